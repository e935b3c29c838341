"""Scoring the points of a sweep, and the baselines that bilingual ones make; on made runs."""

import json
import shutil
import subprocess

import made_runs
import pytest

from gshard_exp.score.quality import Baselines
from gshard_exp.sweep import scoring


@pytest.fixture
def sweep(tmp_path):
    """Two bilingual points with scores of a language each, and a third that was not started."""
    points = []
    for number, code in enumerate(("l00", "l01", "l02")):
        points.append(made_runs.point(code, 4, 4))
        if code != "l02":
            folder = made_runs.make_run(tmp_path / code, config=False)
            keep(folder, [code])
            edit(folder, lambda found, n=number: found["languages"][f"l0{n}"].update(bleu=10.0 + n))
    content = {"schema": 1, "name": "pairs", "base": ["tiny.gin"], "points": points}
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    return tmp_path


def scores(folder):
    return scoring.scores_file(folder, "test", made_runs.STEPS)


def edit(folder, change):
    found = json.loads(scores(folder).read_text())
    change(found)
    scores(folder).write_text(json.dumps(found))


def keep(folder, codes):
    def change(found):
        found["languages"] = {code: found["languages"][code] for code in codes}

    edit(folder, change)


def test_what_is_scored_or_not_trained_is_left_alone(sweep, command, monkeypatch):
    monkeypatch.setattr(scoring.subprocess, "run", None)  # nothing is to be started
    status, out, err = command("sweep", "eval", sweep)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "l00: scored before (1 of 3)",
        "l01: scored before (2 of 3)",
        "l02: not started: only trained points are scored (3 of 3)",
        "2 done, 1 not started",
    ]


def test_a_point_that_cannot_be_scored_does_not_stop_the_rest(sweep, command):
    """Made runs have no checkpoint, so that `eval` refuses them."""
    scores(sweep / "l00").unlink()
    status, out, err = command("sweep", "eval", sweep)
    assert status == 1
    assert out.splitlines()[:2] == ["l00: failed (1 of 3)", "l01: scored before (2 of 3)"]
    assert "l00 failed: exit status 2; the end of" in err and "error:" in err


def test_bilingual_points_make_baselines(sweep, command, tmp_path):
    file = tmp_path / "baselines.json"
    status, out, _ = command("sweep", "eval", sweep, f"--baselines_to={file}")
    assert status == 0 and f"wrote {file}" in out
    read = Baselines.read(str(file))
    assert read.scores == {"l00": 10.0, "l01": 11.0}
    assert (read.metric, read.signature, read.split) == ("bleu", made_runs.SIGNATURE, "test")


def test_a_language_with_few_sentences_gives_no_baseline(sweep):
    edit(sweep / "l00", lambda found: found["languages"]["l00"].update(sentences=19))
    folders = {name: sweep / name for name in ("l00", "l01")}
    assert scoring.baselines(folders, "test")["scores"] == {"l01": 11.0}


def test_two_points_for_one_language_are_no_baseline(sweep, command, tmp_path):
    shutil.copy(scores(sweep / "l00"), scores(sweep / "l01"))
    status, _, err = command("sweep", "eval", sweep, f"--baselines_to={tmp_path / 'b.json'}")
    assert status == 2
    assert "'l00' is scored by l00 and by l01" in err and "--only" in err
    assert not (tmp_path / "b.json").exists()


def test_scores_of_two_kinds_are_no_baselines(sweep, command, tmp_path):
    edit(sweep / "l01", lambda found: found["metrics"].update(bleu="nrefs:1|case:lc"))
    status, _, err = command("sweep", "eval", sweep, f"--baselines_to={tmp_path / 'b.json'}")
    assert status == 2 and "there are 2 ways of scoring" in err


def test_damaged_scores_are_named(sweep, command, tmp_path):
    scores(sweep / "l01").write_text("{")
    status, _, err = command("sweep", "eval", sweep, f"--baselines_to={tmp_path / 'b.json'}")
    assert status == 2 and f"{scores(sweep / 'l01')} is damaged" in err and "--again" in err


@pytest.fixture
def evaluations(monkeypatch):
    """Stand in for `gshard-exp eval`; return the words of each call."""
    called = []

    def run(words, **how):
        called.append(words[4:])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(scoring.subprocess, "run", run)
    return called


def test_scores_of_other_numbers_of_examples_are_not_those_that_are_asked_for(
    sweep, command, evaluations
):
    edit(sweep / "l00", lambda found: found.update(max_examples=5))
    command("sweep", "eval", sweep, "--max_examples=5")
    words = ["--step=400", "--split=test", "--max_examples=5"]
    assert evaluations == [[f"--model_dir={sweep / 'l01'}", *words]]
    evaluations.clear()
    command("sweep", "eval", sweep)
    assert evaluations == [[f"--model_dir={sweep / 'l00'}", *words[:2]]]


def without_bleu(found):
    found["metrics"] = {"chrf": "x"}
    for row in (*found["languages"].values(), *found["averages"].values()):
        row["chrf"] = row.pop("bleu")


def test_a_language_without_bleu_gives_no_baseline_and_stops_nothing(sweep, command, evaluations):
    edit(sweep / "l00", without_bleu)
    file = sweep / "b.json"
    status, out, _ = command("sweep", "eval", sweep, "--again", f"--baselines_to={file}")
    assert status == 0 and "l00: scored (1 of 3)" in out
    assert Baselines.read(str(file)).scores == {"l01": 11.0}
    edit(sweep / "l01", without_bleu)
    status, _, err = command("sweep", "eval", sweep, f"--baselines_to={file}")
    assert status == 2 and "no language of 3 points has a bleu score" in err
    assert "Train the points, and give their tasks the metric bleu." in err


def test_the_folder_of_baselines_is_made_before_anything_is_scored(sweep, command, evaluations):
    again = ("sweep", "eval", sweep, "--again")
    file = sweep / "new" / "folder" / "b.json"
    assert command(*again, f"--baselines_to={file}")[0] == 0
    assert Baselines.read(str(file)).scores == {"l00": 10.0, "l01": 11.0}
    evaluations.clear()
    status, _, err = command(*again, f"--baselines_to={file / 'b.json'}")
    assert status == 2 and f"The folder '{file}' cannot be made" in err
    assert not evaluations

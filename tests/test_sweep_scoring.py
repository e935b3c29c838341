"""Scoring the points of a sweep, and the baselines that bilingual ones make; on made runs."""

import json
import shutil

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

"""Reports of runs whose files hold what nobody expects: the rest is reported, and nothing hides."""

import itertools
import json
from pathlib import Path

import made_runs
import pytest

from gshard_exp import reports
from gshard_exp.sweep import heats, report, scores
from gshard_exp.sweep.runs import Model, Run


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def run(tmp_path):
    return made_runs.make_run(tmp_path / "run", config=False)


def test_numbers_that_are_not_finite_are_left_out(command, run):
    values = itertools.cycle(["NaN", "-Infinity", "1e999", str(10**400)])
    path = run / "train" / "metrics.jsonl"
    *lines, last = path.read_text().splitlines()
    pairs = [
        f'"{key}": {next(values) if isinstance(value, float) else value}'
        for key, value in json.loads(last).items()
    ]
    path.write_text("\n".join([*lines, f"{{{', '.join(pairs)}}}"]) + "\n")
    path = run / "inference_eval" / "test_400" / "scores.json"
    edit(path, lambda found: found["averages"]["macro"].update(bleu="IT"))
    path.write_text(path.read_text().replace('"IT"', next(values)))
    whole = made_runs.make_run(run.parent / "whole", config=False)
    status, _, _ = command("report", run, whole)
    assert status == 0
    content = (run / "report" / "report.json").read_text()
    points = json.loads(content, parse_constant=pytest.fail)["points"]
    assert [point["left_behind"] for point in points] == [None, 0.2 / 400]
    broken, other = report.collect([run, whole]).runs
    assert len(broken.curve) == len(other.curve) - 1
    assert report.average(broken, "bleu") is None


@pytest.mark.parametrize("text", ["3,inf", "nan", "0", "4,-1"])
def test_what_no_loss_can_reach_is_refused(command, run, text):
    status, _, err = command("report", run, f"--reach={text}")
    assert status == 2 and f"--reach={text}" in err and "above 0" in err
    assert not (run / "report").exists()


def evaluated(change):
    content = made_runs.scores(400, 4, 4)
    change(content["languages"])
    damage = []
    return scores.of_evaluation(content, "scores.json", damage), damage


def test_a_language_that_has_no_bleu_is_left_out():
    found, damage = evaluated(lambda languages: languages["l03"].pop("bleu"))
    assert (sorted({*made_runs.CODES} - {*found.languages}), damage) == (["l03"], [])
    assert found.average("bleu") == evaluated(lambda languages: None)[0].average("bleu")


def test_an_evaluation_without_bleu_says_what_to_do():
    found, damage = evaluated(lambda all_: [row.pop("bleu") for row in all_.values()])
    assert found is None and "gshard-exp eval" in damage[0] and "bleu of no language" in damage[0]


def test_a_folder_that_is_not_there_gets_no_report(command, run, tmp_path):
    status, out, err = command("report", tmp_path / "typo", run)
    assert status == 0 and "typo is no folder" in err
    assert not (tmp_path / "typo").exists()
    assert out.splitlines()[-1] == f"outputs: {run / 'report' / 'index.html'}"


def test_runs_whose_names_differ_in_a_sign_have_plots_of_their_own():
    line = {"step": 1, "router/encoder/layer_1/expert_load/0": 1.0}
    names = ["a/b", "a_b", "a_b_2", "A b"]
    runs = [Run(name, Path(name), {}, Model(), {}, [line], [], None, {}, ()) for name in names]
    files = [heat.name for heat in heats.heats(runs)]
    assert len({file.casefold() for file in files}) == len(names)
    assert files[0] == "expert_load_a_b"


def test_a_record_of_another_make_loses_the_cost_and_no_run(run):
    edit(run / "run.json", lambda content: content.update(data="x"))
    found = report.collect([run])
    assert found.notes == [] and found.runs[0].core_hours is None and found.runs[0].curve
    assert [each.what for each in found.damage if "run.json" in each.what] == [
        "run.json is damaged: 'data' is 'x'"
    ]


def test_a_point_without_a_name_loses_the_axes_and_no_run(run):
    content = {"schema": 1, "name": "s", "points": [{"dir": "run", "axes": {}}]}
    (run.parent / "sweep.json").write_text(json.dumps(content))
    found = report.collect([run.parent])
    assert [each.name for each in found.runs] == ["run"]
    assert "sweep.json is damaged: points[0]" in found.damage[0].what
    assert found.damage[0].what.endswith("without their axes.")


def test_the_tile_of_held_out_loss_wants_a_trained_model(run, tmp_path):
    path = run / "training_eval" / "validation" / "metrics.jsonl"
    made_runs.write_lines(path, [{"step": 0, "cross_ent_loss": 0.125}])
    reports.write(report.collect([run]), tmp_path / "out")
    assert "lowest cross entropy" in (page := (tmp_path / "out" / "index.html").read_text())
    assert "lowest held-out loss" not in page

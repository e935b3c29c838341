"""Reports of runs whose files hold what nobody expects: the rest is reported, and nothing hides."""

import json

import made_runs
import pytest

from gshard_exp.sweep import report


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def run(tmp_path):
    return made_runs.make_run(tmp_path / "run", config=False)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_left_out(command, run, value):
    path = run / "train" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[-1])
    row |= {key: "IT" for key in row if isinstance(row[key], float)}
    path.write_text("\n".join([*lines[:-1], json.dumps(row).replace('"IT"', value)]) + "\n")
    scores = run / "inference_eval" / "test_400" / "scores.json"
    edit(scores, lambda found: found["averages"]["macro"].update(bleu="IT"))
    scores.write_text(scores.read_text().replace('"IT"', value))
    whole = made_runs.make_run(run.parent / "whole", config=False)
    status, _, _ = command("report", run, whole)
    assert status == 0
    content = (run / "report" / "report.json").read_text()
    points = json.loads(content, parse_constant=pytest.fail)["points"]
    assert [point["left_behind"] for point in points] == [None, 0.2 / 400]
    broken, other = report.collect([run, whole]).runs
    assert len(broken.curve) == len(other.curve) - 1
    assert report.average(broken, "bleu") is None

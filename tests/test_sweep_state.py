"""What is told of a point whose files are damaged; on made files."""

import json

import made_runs
import pytest

from gshard_exp.sweep import state


@pytest.fixture
def point(tmp_path):
    """The folder of a point that was left at step 10 of 400."""
    (tmp_path / "sweep").mkdir()
    (tmp_path / "train").mkdir()
    record = made_runs.record(4, 4, 1000, 10, 0)
    (tmp_path / "run.json").write_text(json.dumps(record))
    (tmp_path / "sweep" / "exit.json").write_text('{"status": 130}')
    line = {"step": 10, "loss": 2.5, "timing/steps_per_second": 2.0}
    made_runs.write_lines(tmp_path / "train" / "metrics.jsonl", [line])
    return tmp_path


def test_a_point_with_whole_files_has_no_problem(point):
    assert state.status_of(point) == state.Status("interrupted", 10, 400, 2.5, 195.0)


@pytest.mark.parametrize("content", ["", "{}", "[]", "\xff", '{"status": "1"}'])
def test_a_damaged_exit_status_is_a_problem_of_its_point_alone(content, point):
    (point / "sweep" / "exit.json").write_bytes(content.encode("latin-1"))
    status = state.status_of(point)
    assert (status.state, status.step, status.loss) == ("interrupted", 10, 2.5)
    assert "exit.json is damaged" in status.problem


@pytest.mark.parametrize("last", ["x", "[]", "3", '{"loss": 1.0}', '{"step": "3"}', "\xff"])
def test_a_damaged_last_line_of_metrics_is_a_problem_of_its_point_alone(last, point):
    with (point / "train" / "metrics.jsonl").open("ab") as file:
        file.write(last.encode("latin-1") + b"\n")
    status = state.status_of(point)
    assert (status.state, status.step, status.loss) == ("interrupted", 10, None)
    assert "the last line of" in status.problem and "metrics.jsonl is damaged" in status.problem


def test_both_problems_are_told(point):
    (point / "sweep" / "exit.json").write_text("")
    (point / "train" / "metrics.jsonl").write_text("x\n")
    problem = state.status_of(point).problem
    assert "exit.json" in problem and "metrics.jsonl" in problem

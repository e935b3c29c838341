"""Sweeps that run: what is done, killed, failed or claimed, and what a second call makes of it."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_run

from gshard_exp.sweep import launch, state
from gshard_exp.train.record import read_record

pytestmark = pytest.mark.usefixtures("quick_compilation")
REPO = Path(__file__).parent.parent
SWEEP = "tests/gin/sweep.gin"
LIMIT = 300  # seconds until a process of these tests is given up


def line(*words):
    return [sys.executable, "-m", "gshard_exp", *map(str, words)]


def call(*words):
    """Call the command line in a process of its own; return its end."""
    return subprocess.run(line(*words), cwd=REPO, capture_output=True, text=True, timeout=LIMIT)


@contextlib.contextmanager
def started(*words):
    """Start the command line, and leave nothing behind."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line(*words), cwd=REPO, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition, process):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def starts(folder):
    return [start["step"] for start in read_record(folder)["starts"]]


def steps(folder):
    return [record["step"] for record in tiny_run.records(folder)]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The two small points of the sweep, trained two at once; folder, and what was said."""
    folder = tmp_path_factory.mktemp("sweep")
    ended = call("sweep", "run", SWEEP, f"--gin.SWEEP_DIR={folder}", "--only=l1-*", "--jobs=2")
    assert ended.returncode == 0, ended.stderr
    return folder, ended.stdout


def test_a_sweep_trains_each_point_in_a_folder_of_its_own(done):
    folder, said = done
    for name, experts in (("l1-e2", 2), ("l1-e4", 4)):
        assert steps(folder / name) == [1, 2, 3, 4]
        assert read_record(folder / name)["finished"]
        assert f"NUM_EXPERTS = {experts}" in (folder / name / "config.gin").read_text()
        assert "step      4/4" in (folder / name / "sweep" / "log.txt").read_text()
    assert said.splitlines()[-1] == "2 done"
    assert not (folder / "l2-e2").exists()
    assert len(json.loads((folder / "sweep.json").read_text())["points"]) == 4


def test_points_that_are_done_are_not_trained_again(done, command, monkeypatch):
    folder, _ = done
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(launch, "start_process", None)  # nothing is to be started
    arguments = ("sweep", "run", SWEEP, f"--gin.SWEEP_DIR={folder}", "--only=l1-*")
    status, out, err = command(*arguments, "--set=LOG_PERIOD=2")
    assert (status, err) == (0, "")
    assert "l1-e2: done before (1 of 2)" in out
    assert starts(folder / "l1-e2") == [0]


def test_a_point_that_was_trained_with_other_settings_is_left_alone(done, command, monkeypatch):
    folder, _ = done
    monkeypatch.chdir(REPO)
    arguments = ("sweep", "run", SWEEP, f"--gin.SWEEP_DIR={folder}", "--only=l1-e2")
    status, _, err = command(*arguments, "--set=LABEL_SMOOTHING=0.3")
    assert status == 1
    assert "l1-e2 was trained with other settings: model.label_smoothing is 0.1 there" in err
    assert "and 0.3 now" in err
    assert starts(folder / "l1-e2") == [0]


def test_the_status_of_a_sweep_is_told_from_its_file_or_its_folder(done, command, monkeypatch):
    folder, _ = done
    monkeypatch.chdir(REPO)
    status, out, err = command("sweep", "status", SWEEP, f"--gin.SWEEP_DIR={folder}")
    assert (status, err) == (0, "")
    rows = [words.split() for words in out.splitlines()]
    assert rows[0] == ["point", "state", "step", "of", "loss", "left"]
    assert rows[1][:4] == ["l1-e2", "done", "4", "4"]
    assert float(rows[1][4]) == pytest.approx(tiny_run.records(folder / "l1-e2")[-1]["loss"], 1e-3)
    assert rows[3] == ["l2-e2", "not", "started", "0", "-", "-", "-"]
    assert out.splitlines()[-1] == "2 done, 2 not started"
    status, out, _ = command("sweep", "status", folder, "--json")
    assert status == 0
    assert [row["state"] for row in json.loads(out)] == ["done"] * 2 + ["not started"] * 2


def test_a_printed_command_trains_its_point(tmp_path, command, monkeypatch):
    monkeypatch.chdir(REPO)
    arguments = (SWEEP, f"--gin.SWEEP_DIR={tmp_path}", "--only=l1-e2")
    status, printed, err = command("sweep", "commands", *arguments)
    assert (status, err) == (0, "")
    (only,) = printed.splitlines()
    program, *words = shlex.split(only)
    assert program == "gshard-exp"
    assert call(*words).returncode == 0
    assert state.status_of(tmp_path / "l1-e2").state == "done"
    assert "done before" in command("sweep", "run", *arguments)[1]


LONG = ("--set=TRAIN_STEPS=3000", "--set=CHECKPOINT_PERIOD=20", "--set=LOG_PERIOD=5")


def test_a_sweep_that_is_stopped_midway_goes_on_from_where_its_points_were(tmp_path):
    arguments = ("sweep", "run", SWEEP, f"--gin.SWEEP_DIR={tmp_path}", "--only=l1-*")
    with started(*arguments, *LONG) as process:
        wait_for((tmp_path / "l1-e2" / "checkpoint_20").exists, process)
        assert state.status_of(tmp_path / "l1-e2").state == "running"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert "stopping: each run writes a checkpoint" in out
    assert err.endswith("stopped; the same command goes on\n")
    left = state.status_of(tmp_path / "l1-e2")
    assert left.state == "interrupted"
    assert 20 <= left.step < 3000
    assert (tmp_path / "l1-e2" / f"checkpoint_{left.step}").exists()
    assert state.status_of(tmp_path / "l1-e4").state == "not started"
    last = left.step + 5
    ended = call(*arguments[:-1], "--only=l1-e2", f"--set=TRAIN_STEPS={last}", *LONG[1:])
    assert ended.returncode == 0, ended.stderr
    assert f"l1-e2: goes on from step {left.step}" in ended.stdout
    assert starts(tmp_path / "l1-e2") == [0, left.step]
    assert len(steps(tmp_path / "l1-e2")) == len(set(steps(tmp_path / "l1-e2")))


def test_two_calls_at_once_train_each_point_once(tmp_path):
    arguments = ("sweep", "run", SWEEP, f"--gin.SWEEP_DIR={tmp_path}", "--only=l1-*")
    with started(*arguments) as one, started(*arguments) as other:
        said = [process.communicate(timeout=LIMIT)[0] for process in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0)
    for name in ("l1-e2", "l1-e4"):
        assert starts(tmp_path / name) == [0]
        assert steps(tmp_path / name) == [1, 2, 3, 4]
        assert sum(f"{name}: starts" in text for text in said) == 1


FAILING = """\
from __gin__ import dynamic_registration
from gshard_exp.sweep import grid
include 'tests/gin/sweep.gin'

grid.Sweep.axes = [@rate/grid.Axis()]
rate/grid.Axis:
  name = "rate"
  sets = "optimizer.SqrtDecay.learning_rate"
  values = [1e38, 0.5]
layers/grid.Axis.values = ()
"""


def test_a_point_that_fails_does_not_stop_the_rest_and_is_told_at_the_end(
    tmp_path, command, monkeypatch
):
    monkeypatch.chdir(REPO)
    (tmp_path / "failing.gin").write_text(FAILING)
    small = ("--set=NUM_ENCODER_LAYERS=1", "--set=NUM_DECODER_LAYERS=1")
    arguments = (tmp_path / "failing.gin", f"--gin.SWEEP_DIR={tmp_path / 'runs'}", *small)
    status, out, err = command("sweep", "run", *arguments)
    assert status == 1
    log = tmp_path / "runs" / "r1e+38" / "sweep" / "log.txt"
    assert f"r1e+38 failed: exit status 1; the end of {log}:" in err
    assert "is not finite" in err
    assert "r0.5" not in err
    assert out.splitlines()[-1] == "1 done, 1 failed"
    states = json.loads(command("sweep", "status", *arguments, "--json")[1])
    assert [row["state"] for row in states] == ["failed", "done"]


def test_a_lock_lives_as_long_as_the_process_that_trains_and_no_longer(tmp_path):
    lock = state.claim(tmp_path)
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(words, pass_fds=(lock,)) as process:
        os.close(lock)  # as when the launcher is killed
        claimed, again = state.is_claimed(tmp_path), state.claim(tmp_path)
        process.kill()
    assert claimed
    assert again is None
    assert not state.is_claimed(tmp_path)
    lock = state.claim(tmp_path)
    assert lock is not None
    os.close(lock)


def test_jobs_of_a_cluster_train_the_points(tmp_path):
    pytest.importorskip("submitit", reason="submitit is not installed (the extra slurm)")
    arguments = (SWEEP, f"--gin.SWEEP_DIR={tmp_path}", "--only=l1-e2")
    how = ("--launcher=submitit-local", "--slurm=timeout_min=5")
    ended = call("sweep", "run", *arguments, *how)
    assert ended.returncode == 0, ended.stderr
    assert "l1-e2: job " in ended.stdout
    end = time.monotonic() + LIMIT
    while state.status_of(tmp_path / "l1-e2").state != "done":
        assert time.monotonic() < end, list(tmp_path.rglob("*.err"))
        time.sleep(0.2)
    assert starts(tmp_path / "l1-e2") == [0]

"""What a launcher decides before it starts a run, and how it asks one to stop. Nothing runs."""

import contextlib
import json
import os
import signal
import subprocess
import time

import made_runs
import pytest
import tiny_run

from gshard_exp.config import ConfigError, operative_config
from gshard_exp.sweep import cluster, launch, prepare, state
from gshard_exp.train import loop


@pytest.fixture
def changed(tmp_path):
    """A point whose folder holds the settings of another label smoothing; and nothing else yet."""
    sweep = str(tiny_run.GIN / "sweep.gin")

    def read(*flags):
        file = prepare.read_sweep(sweep, [f"SWEEP_DIR={tmp_path}"], flags=flags)
        return prepare.prepare(file, file.points[:1])[0]

    before = read("LABEL_SMOOTHING=0.3")
    before.folder.mkdir()
    (before.folder / "config.gin").write_text(operative_config(before.assembled))
    assert launch.conflict(before) == ""
    return read()


def test_settings_that_nothing_was_trained_with_are_no_conflict(changed):
    assert launch.conflict(changed) == ""
    (changed.folder / "checkpoint_2.orbax-checkpoint-tmp-17").mkdir()  # one that was cut off
    assert launch.conflict(changed) == ""


def test_settings_of_a_checkpoint_are_a_conflict(changed):
    (changed.folder / "checkpoint_2").mkdir()
    assert "label_smoothing is 0.3 there and 0.1 now" in launch.conflict(changed)


def test_settings_of_a_finished_run_whose_checkpoints_were_removed_are_a_conflict(changed):
    record = made_runs.record(1, 2, 1000, made_runs.STEPS, 0)
    (changed.folder / "run.json").write_text(json.dumps(record))
    assert "was trained with other settings" in launch.conflict(changed)


def test_a_run_that_all_of_a_job_and_its_launcher_ask_to_stop_is_asked_once():
    """As scancel does, with what `Crew` adds; a second SIGTERM by somebody else acts as usual."""
    pid = os.getpid()
    with loop._stop_requested() as stop_requested:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, launch.REQUEST)
        time.sleep(0)  # Python runs handlers between instructions
        assert stop_requested()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_launcher_passes_a_request_on_and_kills_when_asked_again():
    class Process:
        def __init__(self):
            self.got = []

        def send_signal(self, number):
            self.got.append(number)

        def kill(self):
            self.got.append(signal.SIGKILL)

    crew = launch.Crew([], jobs=1, report=lambda line: None)
    process = Process()
    crew._running.append(launch._Child(None, process, 0))
    crew._ask()
    crew._stop()
    crew._stop()
    assert process.got == [launch.REQUEST] == [signal.SIGINT]
    crew._ask()
    crew._stop()
    assert process.got == [signal.SIGINT, signal.SIGKILL]


def test_a_point_that_cannot_be_started_does_not_stop_the_rest(tmp_path, monkeypatch):
    """Its folder is a file; of the next nothing can be written to the log."""
    file = prepare.read_sweep(str(tiny_run.GIN / "sweep.gin"), [f"SWEEP_DIR={tmp_path}"])
    points = prepare.prepare(file, file.points[:3])
    points[0].folder.write_text("")

    def start_process(prepared, lock):
        if prepared is points[1]:
            raise OSError(28, "No space left on device")
        return subprocess.Popen(["true"])

    monkeypatch.setattr(launch, "start_process", start_process)
    outcomes = launch.Crew(points, jobs=1, report=lambda line: None).run()
    assert [outcome.name for outcome in outcomes] == [point.name for point in points]
    assert "its folder cannot be written: [Errno 20]" in outcomes[0].problem
    assert "it cannot be started: [Errno 28]" in outcomes[1].problem
    assert state.claim(points[1].folder) is not None  # it was let go


def test_what_a_cluster_refuses_is_one_message(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit", reason="submitit is not installed")

    @contextlib.contextmanager
    def batch(self):
        yield
        raise submitit.core.utils.FailedJobError("sbatch: error: invalid partition specified: TYPO")

    monkeypatch.setattr(submitit.AutoExecutor, "batch", batch)
    monkeypatch.setattr(submitit.AutoExecutor, "submit", lambda self, job: None)
    with pytest.raises(ConfigError, match=r"submitit refuses: .*invalid partition"):
        cluster.submit({"a": ["true"]}, tmp_path, jobs=1, options={}, cluster="local")

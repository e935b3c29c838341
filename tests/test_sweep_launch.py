"""What a launcher decides before it starts a run, and how it asks one to stop. Nothing runs."""

import json
import os
import signal
import time

import made_runs
import pytest
import tiny_run

from gshard_exp.config import operative_config
from gshard_exp.sweep import launch, prepare
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

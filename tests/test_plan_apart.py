"""A process of its own: it is ended with all that it wrote, and what it says is told."""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from gshard_exp.errors import SettingError
from gshard_exp.plan import apart as machinery
from gshard_exp.plan.apart import apart


def busy():
    Path(tempfile.gettempdir(), "large").write_text("what a compiler writes")
    time.sleep(600)


def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    return 7


def refusing():
    raise SettingError("heads=3 do not divide.", hint="Set 4.")


def failing():
    raise RuntimeError("INTERNAL: no")


def dying():
    os.write(2, b"F1234 check failed\n")
    os.abort()


def run(work, report=lambda line: None):
    return apart(work, what="v3:2x2: compiling", report=report)


def test_work_is_reported_on_and_ends_with_all_that_it_wrote_when_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(machinery, "REPORT_EVERY", 0.2)
    said = []

    def report(line):
        said.append(line)
        if list(tmp_path.glob("*/large")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(busy, report)
    assert said[0] == "v3:2x2: compiling, 0 s"
    assert not multiprocessing.active_children()
    assert not list(tmp_path.iterdir())


def test_only_the_process_that_waits_hears_an_interrupt():
    assert run(interrupted) == 7


@pytest.mark.parametrize(
    ("work", "error", "said"),
    [
        (refusing, SettingError, "heads=3 do not divide"),
        (failing, RuntimeError, "INTERNAL: no"),
        (dying, RuntimeError, "status -6:\nF1234 check failed"),
    ],
)
def test_what_goes_wrong_is_told(work, error, said):
    with pytest.raises(error, match=said):
        run(work)

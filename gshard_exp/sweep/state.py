"""What has become of the points of a sweep, read from their folders; and who works on which.

Whoever trains a point holds a lock on a file in its folder. The lock belongs to the open file,
which the training process inherits: it is freed when the last process that has it ends, however
that happens, and not when only its launcher dies.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from gshard_exp.errors import STOPPED
from gshard_exp.train.record import read_record

DONE, RUNNING, FAILED = "done", "running", "failed"
INTERRUPTED, NOT_STARTED = "interrupted", "not started"
STATES = (DONE, RUNNING, FAILED, INTERRUPTED, NOT_STARTED)
_TAIL_BYTES = 1 << 18  # of a metrics file: more than its last line
_TRIES, _PAUSE = 5, 0.1  # for a lock that somebody may only be looking at; seconds


@dataclasses.dataclass(frozen=True)
class Status:
    """What has become of a point.

    Attributes:
        state: one of `STATES`.
        step: the last one that is known.
        train_steps: None before the first start.
        loss: of that step; None if none was written.
        seconds_left: None if that cannot be told, or nothing is left.
        problem: what is wrong with its files; empty if nothing is.
    """

    state: str
    step: int = 0
    train_steps: int | None = None
    loss: float | None = None
    seconds_left: float | None = None
    problem: str = ""


class Files:
    """What a launcher keeps of a point, in `sweep/` in its folder.

    Args:
        folder: MODEL_DIR of the point.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "sweep"
        self.lock = self.folder / "lock"
        self.log = self.folder / "log.txt"
        self._exit = self.folder / "exit.json"

    def write_exit(self, status: int | None) -> None:
        """Note the exit status of the last start; None while it goes on."""
        if status is None:
            self._exit.unlink(missing_ok=True)
            return
        temporary = self._exit.with_suffix(".tmp")
        temporary.write_text(json.dumps({"status": status}), encoding="utf-8")
        os.replace(temporary, self._exit)

    def read_exit(self) -> int | None:
        """Return the exit status of the last start; None if its launcher has not seen it end.

        Raises:
            ValueError: the file is damaged; the message names it.
        """
        try:
            status = json.loads(self._exit.read_text(encoding="utf-8"))["status"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._exit} is damaged: {error!r}") from error
        if type(status) is not int:
            raise ValueError(f"{self._exit} is damaged: the status is {status!r}")
        return status

    def log_tail(self, lines: int) -> list[str]:
        """Return the last lines of the log."""
        try:
            return self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        except FileNotFoundError:
            return []


def claim(folder: Path) -> int | None:
    """Take the lock of a point; return its file descriptor, or None if somebody else has it.

    Give the descriptor to the process that trains: the lock lives as long as one of both has it
    open, so that closing it here is not enough to free it while that process works.
    """
    files = Files(folder)
    files.folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(files.lock, os.O_RDWR | os.O_CREAT, 0o644)
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if left:
                time.sleep(_PAUSE)
    os.close(descriptor)
    return None


def is_claimed(folder: Path) -> bool:
    """Whether a process works on a point."""
    try:
        descriptor = os.open(Files(folder).lock, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def status_of(folder: Path) -> Status:
    """Read what has become of a point; what cannot be read is a problem of it, and never raises."""
    running = is_claimed(folder)
    problems: list[str] = []
    try:
        record = read_record(folder)
    except ValueError as error:
        return Status(RUNNING if running else FAILED, problem=str(error))
    try:
        ended = Files(folder).read_exit()
    except ValueError as error:
        ended = None
        problems.append(str(error))
    if record is None:
        failed = ended not in (None, 0, STOPPED)
        state = RUNNING if running else FAILED if failed else NOT_STARTED
        return Status(state, problem="; ".join(problems))
    try:
        last = last_metrics(folder)
    except ValueError as error:
        last = {}
        problems.append(str(error))
    # The record is older than the metrics while a run goes on, and newer where it logs seldom.
    step = max(record["progress"]["step"], last.get("step", 0) if running else 0)
    if running:
        state = RUNNING
    elif record["finished"] and step >= record["train_steps"]:
        state = DONE
    else:
        state = INTERRUPTED if ended in (None, 0, STOPPED) else FAILED
    left, pace = None, last.get("timing/steps_per_second", 0.0)
    if state != DONE and pace > 0 and math.isfinite(pace):
        left = (record["train_steps"] - step) / pace
    return Status(
        state, step, record["train_steps"], last.get("loss"), left, problem="; ".join(problems)
    )


def finished_steps(folder: Path) -> int:
    """Return the steps of a finished run, whoever holds its lock; 0 if it is not finished."""
    try:
        record = read_record(folder) or {}
    except ValueError:
        return 0  # the run itself says so when it starts again, and keeps the file
    return record["progress"]["step"] if record.get("finished") else 0


def last_metrics(folder: Path) -> dict[str, Any]:
    """Return the numbers of the last line of a run's training metrics; empty if there is none.

    Raises:
        ValueError: that line is damaged; the message names the file.
    """
    path = folder / "train" / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read()
    except FileNotFoundError:
        return {}
    whole = text[: text.rfind(b"\n") + 1].splitlines()
    if not whole:
        return {}
    try:
        line = json.loads(whole[-1])
    except ValueError as error:
        raise ValueError(f"the last line of {path} is damaged: {error}") from error
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        raise ValueError(f"the last line of {path} is damaged: it is no object with a step")
    return {key: value for key, value in line.items() if type(value) in (int, float)}

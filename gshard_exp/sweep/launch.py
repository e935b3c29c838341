"""Trains the points of a sweep in processes of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gshard_exp.config.diff import differences
from gshard_exp.config.errors import ConfigError
from gshard_exp.config.reading import read_files
from gshard_exp.errors import STOPPED
from gshard_exp.sweep.prepare import Prepared
from gshard_exp.sweep.state import (
    DONE,
    FAILED,
    INTERRUPTED,
    RUNNING,
    Files,
    claim,
    finished_steps,
    status_of,
)
from gshard_exp.train.checkpoint import checkpoint_steps
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.metrics import clock
from gshard_exp.train.record import sizes

TAIL = 15  # lines of a log that are shown of a run that failed
_POLL = 0.2  # seconds
# How a run is asked to stop. Not by SIGTERM: SLURM sends that to all processes of a job, those that
# we started too, and another one from us would be their second, which kills them while they save.
REQUEST = signal.SIGINT
# What may change between two starts of a run without making it another experiment.
FREE = re.compile(
    r"(model_dir|train_steps|mesh|checkpoints|evaluators|log_every_steps|search)\b|.*\.cache_dir$"
)
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a launcher leaves a point.

    Attributes:
        name: of the point.
        state: done, failed, interrupted, or running: by somebody else.
        problem: what went wrong, several lines; empty if nothing did.
    """

    name: str
    state: str
    problem: str = ""


def command_line(prepared: Prepared) -> list[str]:
    """Return the command that trains a point, for this Python."""
    return [sys.executable, "-m", "gshard_exp", *prepared.words]


def shown_command(prepared: Prepared) -> str:
    """Write that command for a shell."""
    return shlex.join(["gshard-exp", *prepared.words])


def conflict(prepared: Prepared) -> str:
    """Say what in a point's folder was trained with other settings; empty if nothing was.

    A run that ended before its first checkpoint left its settings, and nothing trained with them.
    """
    config = prepared.folder / "config.gin"
    trained = checkpoint_steps(prepared.folder) or finished_steps(prepared.folder)
    if not config.exists() or not trained:
        return ""
    try:
        found = read_files(str(config), [str(config)]).assembled
    except ConfigError as error:
        return f"{config} cannot be read: {error.problem}"
    for difference in differences(found, prepared.assembled):
        if not FREE.match(difference.path):
            there, now = (side.value if side else "absent" for side in (difference.a, difference.b))
            return (
                f"{prepared.folder} was trained with other settings: {difference.path} is {there} "
                f"there and {now} now. Remove the folder, or give the sweep another one."
            )
    return ""


class Crew:
    """Up to `jobs` processes that train points, each of which is claimed while it is trained.

    Args:
        points: in the order in which they are started.
        jobs: how many at once.
        report: is told a line when a point begins or ends.
        progress: is told, about once a second, how all of it stands.
    """

    def __init__(
        self,
        points: Sequence[Prepared],
        *,
        jobs: int,
        report: Say,
        progress: Say = lambda line: None,
    ) -> None:
        self._waiting, self._jobs = list(points), jobs
        self._report, self._progress = report, progress
        self._running: list[_Child] = []
        self._outcomes: list[Outcome] = []
        self._all, self._pace = len(points), _Pace(points)
        self._asked = self._told = 0  # how often to stop, and how often that was passed on

    def run(self) -> list[Outcome]:
        """Train what is not done; return how each point was left, in the order of their ends.

        The first Ctrl-C (or SIGTERM) is passed on: runs save themselves. The second kills them.
        """
        said = time.monotonic()
        try:
            with _signals(self._ask):
                while self._waiting or self._running:
                    while self._waiting and len(self._running) < self._jobs and not self._asked:
                        self._start(self._waiting.pop(0))
                    self._stop()
                    self._reap()
                    if self._running:
                        time.sleep(_POLL)
                    if time.monotonic() - said > 1:
                        said = time.monotonic()
                        self._progress(self._standing())
        finally:  # nobody is left behind where a launcher fails
            for child in self._running:
                child.process.terminate()
        return self._outcomes

    @property
    def stopped(self) -> bool:
        """Whether the user asked to stop."""
        return self._asked > 0

    def _start(self, prepared: Prepared) -> None:
        try:
            lock = claim(prepared.folder)
        except OSError as error:  # concerns this point alone
            self._end(Outcome(prepared.name, FAILED, f"its folder cannot be written: {error}"))
            return
        if lock is None:
            self._end(Outcome(prepared.name, RUNNING), before=True)
            return
        problem = conflict(prepared)
        if problem or is_done(prepared):
            os.close(lock)
            ended = Outcome(prepared.name, FAILED if problem else DONE, problem)
            self._end(ended, before=True)
            return
        begins = f"{prepared.name}: {_beginning(prepared.folder)}"
        try:
            process = start_process(prepared, lock)
        except OSError as error:
            os.close(lock)
            self._end(Outcome(prepared.name, FAILED, f"it cannot be started: {error}"))
            return
        self._report(begins)
        self._running.append(_Child(prepared, process, lock))

    def _reap(self) -> None:
        for child in list(self._running):
            status = child.process.poll()
            if status is not None:
                self._running.remove(child)
                outcome = note_end(child.prepared, status, asked=self.stopped)
                os.close(child.lock)
                self._end(outcome)

    def _end(self, outcome: Outcome, *, before: bool = False) -> None:
        self._outcomes.append(outcome)
        said = outcome.state
        if outcome.state == RUNNING:
            said = "another process trains it"
        elif before and outcome.state == DONE:
            said = "done before"
        counted = f"{len(self._outcomes)} of {self._all}"
        self._report(f"{outcome.name}: {said} ({counted}{self._pace.left()})")

    def _standing(self) -> str:
        parts = []
        for child in self._running:
            status = status_of(child.prepared.folder)
            loss = "" if status.loss is None else f" loss {status.loss:.3f}"
            steps = child.prepared.assembled.tree.train_steps
            parts.append(f"{child.prepared.name} {status.step}/{steps}{loss}")
        ended = f"{len(self._outcomes)} of {self._all}"
        return f"{ended}{self._pace.left()}: {', '.join(parts)}"

    def _ask(self) -> None:
        self._asked += 1

    def _stop(self) -> None:
        """Pass on what the user asked for since the last time."""
        if self._told == self._asked:
            return
        self._told = self._asked
        self._waiting.clear()
        for child in self._running:
            if self._asked == 1:
                child.process.send_signal(REQUEST)
            else:
                child.process.kill()
        if self._running and self._asked == 1:
            self._report("stopping: each run writes a checkpoint; once more kills them")


@dataclasses.dataclass(frozen=True)
class _Child:
    prepared: Prepared
    process: subprocess.Popen
    lock: int  # file descriptor


def start_process(prepared: Prepared, descriptor: int) -> subprocess.Popen:
    """Train a point in a process of its own, which inherits the lock and writes a log.

    It has a process group of its own: what the terminal sends to ours, such as Ctrl-C, reaches it
    once, through its launcher.
    """
    files, words = Files(prepared.folder), command_line(prepared)
    files.write_exit(None)
    with files.log.open("ab") as log:
        log.write(f"\n$ {shown_command(prepared)}\n".encode())
        log.flush()
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(descriptor,),
            process_group=0,
        )


def note_end(prepared: Prepared, status: int, *, asked: bool = False) -> Outcome:
    """Keep the exit status of a run, and say what it means.

    Args:
        prepared: the point.
        status: as of `subprocess.Popen.returncode`.
        asked: it was asked to stop: before its first step a signal ends it at once.
    """
    files = Files(prepared.folder)
    if asked and -status in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        status = STOPPED
    files.write_exit(status)
    if status == 0:
        return Outcome(prepared.name, DONE)
    if status == STOPPED:
        return Outcome(prepared.name, INTERRUPTED)
    how = f"exit status {status}" if status > 0 else f"killed by {signal.Signals(-status).name}"
    tail = "\n".join(f"    {line}" for line in files.log_tail(TAIL))
    return Outcome(prepared.name, FAILED, f"{how}; the end of {files.log}:\n{tail}")


def is_done(prepared: Prepared) -> bool:
    """Whether a point was trained to the steps that it asks for."""
    return finished_steps(prepared.folder) >= prepared.assembled.tree.train_steps


def _beginning(folder: Path) -> str:
    steps = checkpoint_steps(folder)
    return f"goes on from step {steps[-1]}" if steps else "starts"


class _Pace:
    """Estimates the time left from the work done since the launcher started.

    Work is counted in useful FLOPs, since points differ in size.
    """

    def __init__(self, points: Sequence[Prepared]) -> None:
        self._points = points
        self._work = [_work(point.assembled.tree) for point in points]
        self._began = time.monotonic()
        self._before = self._done()

    def left(self) -> str:
        """Write the time left at the pace of all jobs together, once something was done."""
        done, whole = self._done(), 0.0
        for point, work in zip(self._points, self._work, strict=True):
            whole += point.assembled.tree.train_steps * work
        gained = done - self._before
        if gained <= 0 or done >= whole:
            return ""
        seconds = (whole - done) * (time.monotonic() - self._began) / gained
        return f", about {clock(seconds)} left"

    def _done(self) -> float:
        done = 0.0
        for point, work in zip(self._points, self._work, strict=True):
            steps = status_of(point.folder).step
            done += min(steps, point.assembled.tree.train_steps) * work
        return done


def _work(experiment: Experiment) -> float:
    """Return the useful FLOPs of a step; 1 where they are not known."""
    known = sizes(experiment)
    if known["flops_per_token"] is None:
        return 1.0
    return known["flops_per_token"] * known["tokens_per_step"]


@contextlib.contextmanager
def _signals(ask: Callable[[], None]) -> Iterator[None]:
    """Call `ask` for each SIGINT and SIGTERM."""
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda number, frame: ask())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Calls the compiler in a process of its own: it cannot be interrupted, and speaks to the terminal.

A process can be ended, its words are kept, and what it leaves on disk goes with it.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from gshard_exp.errors import SettingError

REPORT_EVERY = 10.0  # seconds
Report = Callable[[str], None]


def apart(work: Callable[..., Any], *arguments: Any, what: str, report: Report) -> Any:
    """Return what a function returns that is called in a process of its own.

    Args:
        work: a module's function.
        arguments: its.
        what: is done, for `report`.
        report: is told every ten seconds that the work goes on.

    Raises:
        SettingError: the function's.
        RuntimeError: the function's, or its process ended; with what it said.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(
            target=_child, args=(sender, folder, work, arguments), daemon=True
        )
        try:
            with _uninterrupted():
                process.start()
            sender.close()
            answer = _wait(receiver, what, report)
        except EOFError:
            process.join()
            said = _words(folder).read_text(errors="replace")[-2000:]
            raise RuntimeError(
                f"the compiler ended with status {process.exitcode}:\n{said}"
            ) from None
        finally:
            # Done, or the user has had enough; a compiler does not listen to anything milder.
            if process.pid is not None:
                process.kill()
                process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back: a process that is started meanwhile never hears it; this one answers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(receiver: Connection, what: str, report: Report) -> Any:
    began = time.monotonic()
    while not receiver.poll(REPORT_EVERY):
        report(f"{what}, {time.monotonic() - began:.0f} s")
    return receiver.recv()


def _words(folder: str) -> Path:
    return Path(folder) / "compiler.txt"


def _child(sender: Connection, folder: str, work: Callable[..., Any], arguments: tuple) -> None:
    # libtpu and XLA warn about the machine that is not there.
    log = os.open(_words(folder), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    tempfile.tempdir = folder
    jax.config.update("jax_platforms", "cpu")
    try:
        sender.send(work(*arguments))
    except SettingError as error:
        sender.send(error)
    except RuntimeError as error:  # JAX's own does not travel between processes
        sender.send(RuntimeError(str(error)))

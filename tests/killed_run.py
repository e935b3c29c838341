"""Runs of the command line in processes of their own, which kill themselves at a chosen point."""

import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import jax

SIGKILLED = -signal.SIGKILL

# Importing JAX, TensorFlow and seqio takes most of a short run: the fork server does it once.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["gshard_exp.train.loop", "gshard_exp.data.token_source"])


def run(argv: Sequence[str], kill: str | None = None) -> int:
    """Run the command line in a new process; return its exit status.

    Args:
        argv: its arguments.
        kill: `batch N`: SIGKILL when the N-th batch of the process is asked for; `writing N`:
            while its N-th checkpoint is being written; `written N`: when that one is whole.
    """
    # The server may have started in another module, and with other settings than those of now.
    settings = {
        "jax_compilation_cache_dir": jax.config.jax_compilation_cache_dir,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_disable_most_optimizations": jax.config.read("jax_disable_most_optimizations"),
    }
    process = _server.Process(target=_main, args=(list(argv), kill, settings))
    process.start()
    process.join(300)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    process.close()
    assert status is not None, f"{argv} did not end"
    return status


def _main(argv: list[str], kill: str | None, settings: Mapping[str, Any]) -> None:
    from gshard_exp.cli import main

    for name, value in settings.items():
        jax.config.update(name, value)
    if kill is not None:
        _arm(*kill.split())
    raise SystemExit(main(argv))


def _arm(event: str, count: str) -> None:
    from gshard_exp.train import loop
    from gshard_exp.train.checkpoint import CheckpointFolder

    left = int(count)

    def counted() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    place, save = loop.to_mesh, CheckpointFolder.save

    def place_or_die(*arguments):
        if counted():
            os.kill(os.getpid(), signal.SIGKILL)
        return place(*arguments)

    def save_and_die(self, *arguments):
        save(self, *arguments)
        if counted():
            if event == "written":
                self._manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)

    if event == "batch":
        loop.to_mesh = place_or_die
    else:
        CheckpointFolder.save = save_and_die

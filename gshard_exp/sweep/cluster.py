"""Hands the points of a sweep to a SLURM cluster, through submitit (the extra `slurm`)."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard_exp.config.errors import ConfigError
from gshard_exp.errors import STOPPED

SLURM = "slurm"
LOGS = ".submitit"  # of submitit's own files, in the folder of the sweep
# SLURM announces with this signal that a job's time is up. It may reach all processes of a job,
# and only submitit knows what to do about it. What a shell ignores, its successor ignores too.
_DEAF = ("sh", "-c", 'trap "" USR2; exec "$@"', "sh")


class PointFailed(RuntimeError):
    """The run of a point ended with an error."""


class PointJob:
    """A job that trains one point by `gshard-exp sweep run F --only=POINT`.

    So a job does what that command does: it claims the point, which jobs of two submissions do not
    train twice, leaves alone what is done, and goes on with what was begun. When its time is up
    submitit calls `checkpoint`: the run saves itself, and the job is queued again.

    Args:
        words: of that command, after `gshard-exp`.
        folder: in which the command is given; relative paths start there.
    """

    def __init__(self, words: Sequence[str], folder: str) -> None:
        self._words, self._folder = list(words), folder
        self._process: subprocess.Popen | None = None

    def __call__(self) -> None:
        """Train.

        Raises:
            PointFailed: the command ended with an error, which the job's output tells.
        """
        command = [*_DEAF, sys.executable, "-m", "gshard_exp", *self._words]
        self._process = subprocess.Popen(command, cwd=self._folder)
        status = self._process.wait()
        if status not in (0, STOPPED):
            raise PointFailed(f"gshard-exp {' '.join(self._words)}: exit status {status}")

    def checkpoint(self) -> Any:
        """Stop the run, which saves itself, and ask for another job that goes on."""
        import submitit

        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        return submitit.helpers.DelayedSubmission(PointJob(self._words, self._folder))


def options_of(flags: Sequence[str]) -> dict[str, Any]:
    """Read `KEY=VALUE` of `--slurm`: parameters of submitit's AutoExecutor.

    Raises:
        ConfigError: there is no value.
    """
    options = {}
    for flag in flags:
        key, equals, text = flag.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"'{flag}' sets nothing.",
                rule="It is one word with a name and a value.",
                at=[f"command line: --slurm={flag}"],
                hint="--slurm=timeout_min=240, --slurm=slurm_partition=NAME",
            )
        try:
            options[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[key] = text
    return options


def submit(
    commands: Mapping[str, Sequence[str]],
    folder: Path,
    *,
    jobs: int,
    options: Mapping[str, Any],
    cluster: str = SLURM,
) -> list[Any]:
    """Submit a job for each point, as one array.

    Args:
        commands: words of the command of each point, by its name.
        folder: of the sweep.
        jobs: that may run at once.
        options: of `options_of`.
        cluster: as submitit calls it: `slurm`, or `local` for processes of this machine.

    Returns:
        submitit's jobs, in the order of the points.

    Raises:
        ConfigError: submitit is missing or refuses something.
    """
    if importlib.util.find_spec("submitit") is None:
        raise ConfigError(
            "submitit is not installed.",
            rule="It is what hands jobs to SLURM.",
            at=[f"command line: --launcher={cluster}"],
            hint="pip install 'gshard_exp[slurm]', or --launcher=local",
        )
    import submitit

    try:
        executor = submitit.AutoExecutor(folder / LOGS, cluster=cluster)
        executor.update_parameters(slurm_array_parallelism=jobs, **options)
        with executor.batch():  # submits where it ends
            return [executor.submit(PointJob(words, os.getcwd())) for words in commands.values()]
    except (RuntimeError, NameError, TypeError, ValueError) as error:
        raise ConfigError(
            f"submitit refuses: {str(error).strip()}",
            at=[f"command line: --launcher={cluster}"],
            hint="gshard-exp sweep commands F prints what another scheduler can run",
        ) from error

"""Checks many experiments without a device, a corpus or a file written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard_exp.config.errors import ConfigError
from gshard_exp.config.reading import placeholder_note, read_subject
from gshard_exp.config.search import shipped_root

# What is shipped and complete: other gin files are parts of an experiment.
COMPLETE = ("gin/paper/*.gin", "experiments/*/*.gin")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one experiment.

    Attributes:
        name: as it was given.
        problem: the whole message; empty if the experiment is valid.
        placeholders: macros that were filled in.
    """

    name: str
    problem: str = ""
    placeholders: tuple[str, ...] = ()


def complete_experiments() -> list[str]:
    """List the shipped gin files that are experiments of their own, from the folder of all."""
    root = shipped_root()
    found = [path for pattern in COMPLETE for path in sorted(root.glob(pattern))]
    return [str(path.relative_to(root)) for path in found]


def validate(
    name: str,
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    assignments: Sequence[str] = (),
    *,
    trace: bool = False,
) -> Verdict:
    """Parse, assemble and check one experiment; see `train.experiment.check_without_devices`.

    Args:
        name: as of `reading.read_subject`.
        bindings: `NAME=VALUE`; these win over files.
        search_paths: folders in which gin files are looked for.
        assignments: `PATH=VALUE`, for a fiddle config.
        trace: also trace the training step: seconds instead of a fraction of one.
    """
    from gshard_exp.train.experiment import check_without_devices

    try:
        subject = read_subject(name, bindings, search_paths, assignments)
        with subject.assembled.explaining():
            check_without_devices(subject.assembled.tree, trace=trace)
    except ConfigError as error:
        return Verdict(name, problem=str(error))
    return Verdict(name, placeholders=subject.placeholders)


def summary(verdicts: Sequence[Verdict]) -> str:
    """Write one line an experiment, the whole message of each failure, and the counts."""
    lines = []
    for verdict in verdicts:
        lines.append(f"{'FAILED' if verdict.problem else 'ok':6}  {verdict.name}")
        lines += [f"        {line}" for line in verdict.problem.splitlines()]
    failed = sum(bool(verdict.problem) for verdict in verdicts)
    lines.append(f"{len(verdicts)} checked, {failed} failed")
    filled = dict.fromkeys(name for verdict in verdicts for name in verdict.placeholders)
    note = placeholder_note(tuple(filled))
    return "\n".join(lines + [note] * bool(note))

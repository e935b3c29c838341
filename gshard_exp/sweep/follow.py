"""Tabulates how far the points of a sweep are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard_exp.sharding.tables import columns
from gshard_exp.sweep.state import STATES, status_of
from gshard_exp.train.metrics import clock


def rows(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what `sweep.state.status_of` says of each point, and its name."""
    return [{"name": name, **dataclasses.asdict(status_of(folder / name))} for name in names]


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Lay them out, and count states."""
    lines: list[tuple[str, ...]] = [("point", "state", "step", "of", "loss", "left")]
    for row in found:
        left = row["seconds_left"]
        lines.append(
            (
                row["name"],
                row["state"],
                f"{row['step']:,}",
                "-" if row["train_steps"] is None else f"{row['train_steps']:,}",
                "-" if row["loss"] is None else f"{row['loss']:.3f}",
                "-" if left is None else clock(left),
            )
        )
    counts = {state: sum(row["state"] == state for row in found) for state in STATES}
    total = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    problems = [f"{row['name']}: {row['problem']}" for row in found if row["problem"]]
    return "\n".join([*columns(lines), total, *problems])

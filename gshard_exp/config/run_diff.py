"""Compares what two runs recorded of themselves (run.json): data, code, machine, cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard_exp.config.errors import ConfigError
from gshard_exp.config.reading import FIDDLE
from gshard_exp.sharding.tables import columns

_LONGEST = 100  # letters of a value
# Parts of a record, and where in the last start (None: at the top) they stand.
_PARTS = {
    "data": None,
    "seed": None,
    "code": "starts",
    "python": "starts",
    "packages": "starts",
    "machine": "starts",
    "mesh": "starts",
}
_COST = {
    "step": "steps taken",
    "wall_seconds": "hours",
    "cpu_seconds": "processor-hours",
    "core_seconds": "core-hours",
}


def run_diff(a: str, b: str) -> str:
    """Write what differs in the records of two run folders; empty if one of them is no such folder.

    Of a run that was started several times, the last start counts.

    Raises:
        ConfigError: a record is damaged.
    """
    if any(name.startswith(FIDDLE) or not Path(name).is_dir() for name in (a, b)):
        return ""
    one, other = _record(a), _record(b)
    if one is None or other is None:
        without = a if one is None else b
        return f"{without} has no run.json: data, code and machine are not known"
    lines = []
    for part, where in _PARTS.items():
        values = [record[where][-1] if where else record for record in (one, other)]
        of_a, of_b = (dict(_flat(value[part], part)) for value in values)
        for path in dict.fromkeys((*of_a, *of_b)):
            if of_a.get(path) != of_b.get(path):
                lines += [
                    path,
                    *(f"  {s} {_shown(v, path)}" for s, v in (("A", of_a), ("B", of_b))),
                ]
    for side, record in (("A", one), ("B", other)):
        starts = record["starts"]
        if changed := [part for part, where in _PARTS.items() if where and _changed(starts, part)]:
            lines.append(f"{side} was started {len(starts)} times; {', '.join(changed)} changed")
    if not lines:
        lines = ["no difference in data, seed, code, packages, machine or mesh"]
    return "\n".join([*lines, "", *columns(_costs(one, other))])


def _changed(starts: Sequence[Mapping[str, Any]], part: str) -> bool:
    return any(start[part] != starts[-1][part] for start in starts)


def _record(name: str) -> dict[str, Any] | None:
    from gshard_exp.train.record import read_record

    try:
        return read_record(Path(name))
    except ValueError as error:
        raise ConfigError(
            f"{error}.", at=[name], hint="remove the file: settings can be compared without it"
        ) from error


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}")
    else:
        yield path, value


def _shown(values: Mapping[str, Any], path: str) -> str:
    text = str(values[path]) if path in values else "(nothing here)"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _costs(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("spent so far", "A", "B")]
    for key, name in _COST.items():
        values = (record["progress"][key] for record in (one, other))
        form = "{:,}" if key == "step" else "{:.3f}"
        unit = 1 if key == "step" else 3600
        rows.append((name, *(form.format(v if unit == 1 else v / unit) for v in values)))
    return rows

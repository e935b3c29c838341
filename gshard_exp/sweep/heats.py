"""Heat maps of a run with experts: load by layer and expert, drops by layer and step."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gshard_exp.sweep.runs import Run
from gshard_exp.sweep.scores import is_number

MOST_COLUMNS = 48  # more would not be told apart


@dataclasses.dataclass(frozen=True)
class Heat:
    """A value for each layer and column.

    Attributes:
        name: of its files.
        title: what it shows.
        about: how the values were made.
        run: whose it is.
        rows: layers.
        columns: experts or steps.
        column_label: what columns are.
        values: rows of columns; None where nothing was logged.
        unit: "%" or "" (a plain number).
        middle: the value that is neither high nor low; None: low is good, from 0.
        section: of the page.
    """

    name: str
    title: str
    about: str
    run: str
    rows: Sequence[str]
    columns: Sequence[str]
    column_label: str
    values: Sequence[Sequence[float | None]]
    unit: str
    middle: float | None
    section: str = "experts"


_LOAD = re.compile(r"router/(\w+)/layer_(\d+)/expert_load/(p?)(\d+)$")
_DROPS = {
    "fraction_dropped_first": "First choices without a slot",
    "fraction_dropped_second": "Second choices without a slot",
    "fraction_tokens_left_behind": "Tokens that no expert held",
}


def heats(runs: Sequence[Run]) -> list[Heat]:
    """Draw load by layer and expert, and drops by layer and step, of each run with experts."""
    files = _files([run.name for run in runs])
    return [heat for run, file in zip(runs, files, strict=True) for heat in _heats(run, file)]


def _heats(run: Run, file: str) -> list[Heat]:
    found = []
    load = _load(run, file)
    if load is not None:
        found.append(load)
    lines = _spread(run.lines, MOST_COLUMNS)
    for metric, title in _DROPS.items():
        places = _layers(run.lines, rf"router/(\w+)/layer_(\d+)/{metric}$")
        if not places:
            continue
        values = [
            [_number(line, f"router/{stack}/layer_{layer}/{metric}") for line in lines]
            for stack, layer in places
        ]
        found.append(
            Heat(
                name=f"{metric}_{file}",
                title=title,
                about="Fraction of the tokens of a layer, mean of the steps up to each line.",
                run=run.name,
                rows=[f"{stack} {layer}" for stack, layer in places],
                columns=[str(line["step"]) for line in lines],
                column_label="step",
                values=values,
                unit="%",
                middle=None,
            )
        )
    return found


def _load(run: Run, file: str) -> Heat | None:
    """Draw the load of each expert in the last logged steps, even = 1."""
    last: Mapping[str, Any] = run.lines[-1] if run.lines else {}
    loads: dict[tuple[str, int], dict[int, float]] = {}
    deciles = False
    for key, value in last.items():
        match = _LOAD.match(key)
        if match and is_number(last, key):
            deciles = bool(match[3])
            loads.setdefault((match[1], int(match[2])), {})[int(match[4])] = value
    if not loads:
        return None
    places = sorted(loads, key=_place)
    experts = sorted({expert for row in loads.values() for expert in row})
    rows = []
    for place in places:
        row = loads[place]
        # Of deciles the median stands for even load: there the number of experts was not logged.
        even = sorted(row.values())[len(row) // 2] if deciles else sum(row.values()) / len(row)
        rows.append([row[e] / even if e in row and even else None for e in experts])
    return Heat(
        name=f"expert_load_{file}",
        title="Load of each expert" if not deciles else "Load of experts, by decile",
        about="Share of all choices that asked for the expert, over the "
        f"{'median' if deciles else 'mean'}, in the last logged steps (to step {run.step}).",
        run=run.name,
        rows=[f"{stack} {layer}" for stack, layer in places],
        columns=[f"{'p' if deciles else ''}{expert}" for expert in experts],
        column_label="decile" if deciles else "expert",
        values=rows,
        unit="",
        middle=1.0,
    )


def _number(line: Mapping[str, Any], key: str) -> float | None:
    return line[key] if is_number(line, key) else None


def _layers(lines: Sequence[Mapping[str, Any]], pattern: str) -> list[tuple[str, int]]:
    """List (stack, layer) of what the last line has by layer, the encoder's first."""
    keys = lines[-1] if lines else {}
    matches = [match for key in keys if (match := re.match(pattern, key))]
    return sorted({(match[1], int(match[2])) for match in matches}, key=_place)


def _place(place: tuple[str, int]) -> tuple[bool, str, int]:
    return place[0] != "encoder", place[0], place[1]


def _files(names: Sequence[str]) -> list[str]:
    """Make a part of a file's name of each run's name; no two are the same, in any case."""
    found: list[str] = []
    taken: set[str] = set()
    for name in names:
        plain = re.sub(r"[^\w.-]+", "_", name)
        tries = itertools.chain([plain], (f"{plain}_{number}" for number in itertools.count(2)))
        found.append(next(text for text in tries if text.casefold() not in taken))
        taken.add(found[-1].casefold())
    return found


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """Take at most so many items, evenly, first and last included."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]

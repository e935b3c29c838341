"""The report's tables, as Markdown, CSV, JSON and text for a terminal."""

import csv
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from gshard_exp.sharding.tables import columns
from gshard_exp.sweep.report import Report, point_columns, tokens_to_reach, written
from gshard_exp.sweep.runs import differing_settings

CORE = ("point", "status", "cross_entropy")  # columns that stay, even where no run has a value


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: of its files.
        title: a line above it.
        heads: of columns, for people.
        keys: of columns, for programs.
        rows: of values as text.
        values: the same as numbers and texts, None where there is none.
        about: how values were made; empty if the heads say it.
    """

    name: str
    title: str
    heads: tuple[str, ...]
    keys: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    values: Sequence[tuple[Any, ...]]
    about: str = ""


def points(report: Report) -> Table:
    """Tabulate the runs; a column that no run has a value for is left out."""
    kept = [
        column
        for column in point_columns(report)
        if column[0] in CORE or any(column[2](run) is not None for run in report.runs)
    ]
    values = [tuple(of(run) for _, _, of, _ in kept) for run in report.runs]
    rows = [
        tuple(written(value, form) for value, (_, _, _, form) in zip(row, kept, strict=True))
        for row in values
    ]
    about = (
        "Loss: training cross entropy, nats per target piece, in the last logged steps, without "
        "the routers' losses; held-out: on validation text. Params: all; active: those that one "
        "token uses. Tokens: both sides, without padding. FLOPs: useful operations of training so "
        "far. core-h: hours of cores, as recorded; step-h: hours by the clock, of the steps alone. "
        "Left behind: tokens that no expert held."
    )
    return Table(
        "points",
        "Points",
        tuple(head for _, head, _, _ in kept),
        tuple(key for key, _, _, _ in kept),
        rows,
        values,
        about,
    )


def thresholds(report: Report) -> Table:
    """Tabulate the tokens to reach each cross entropy, as the paper's Table 2."""
    reached = [[tokens_to_reach(run.curve, t) for t in report.thresholds] for run in report.runs]
    heads = ("point", *(f"{t:g}" for t in report.thresholds))
    values = [(run.name, *row) for run, row in zip(report.runs, reached, strict=True)]
    rows = [
        (run.name, *(written(tokens, "si") for tokens in row))
        for run, row in zip(report.runs, reached, strict=True)
    ]
    about = (
        "Tokens (both sides, without padding) until the training loss first is at or below; "
        "a dash: not yet."
    )
    return Table(
        "tokens_to_reach", "Tokens to reach a cross entropy", heads, heads, rows, values, about
    )


def settings(report: Report) -> Table:
    """Tabulate the settings that the runs do not agree in."""
    heads = ("setting", *(run.name for run in report.runs))
    values: list[tuple[str | None, ...]] = []
    for paths, row in differing_settings(report.runs):
        others = f" (and {len(paths) - 1} alike)" if len(paths) > 1 else ""
        values.append((f"{paths[0]}{others}", *row))
    rows = [tuple(written(value, "") for value in row) for row in values]
    return Table("settings", "Settings that differ", heads, heads, rows, values)


def markdown(table: Table) -> str:
    """Write a table as Markdown, without its title."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---", *["---:"] * (len(table.heads) - 1)]
    return "\n".join([line(table.heads), line(rule), *map(line, table.rows)])


def csv_text(table: Table) -> str:
    """Write a table as CSV with unrounded values; nothing where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.keys)
    writer.writerows(["" if value is None else value for value in row] for row in table.values)
    return text.getvalue()


def as_objects(table: Table) -> list[dict[str, Any]]:
    """Return a table's rows as objects, for JSON."""
    return [dict(zip(table.keys, row, strict=True)) for row in table.values]


def terminal(table: Table) -> str:
    """Write a table for a terminal."""
    return "\n".join(columns([table.heads, *table.rows]))

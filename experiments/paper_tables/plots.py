"""Figures 7 and 8 and compile time, published beside ours, as PNG and SVG."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import tables

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(plans: Mapping[str, dict], published: Mapping, folder: Path) -> None:
    """Write all plots that the compiled rows allow."""
    found = {table.name: table for table in tables.all_tables(plans, published)}
    _pairs(found["figure_7"], 4, 5, "GB a core", folder / "figure_7")
    _pairs(found["table_3"], 3, 4, "steps/s", folder / "table_3")
    _bars(found["figure_8"], folder / "figure_8")
    _line(found["compile_time"], 1, "processor seconds to compile", folder / "compile_time")
    _line(found["all_to_all"], 4, "ms for an all-to-all of 8 MiB", folder / "all_to_all")


def _save(figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=120)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


def _pairs(table: tables.Table, published: int, ours: int, label: str, path: Path) -> None:
    rows = [row for row in table.rows if "-" not in (row[published], row[ours])]
    figure, axis = plt.subplots(figsize=(8, 3.5))
    for shift, column, name in ((-0.2, published, "paper"), (0.2, ours, "ours")):
        values = [float(row[column]) for row in rows]
        axis.bar([i + shift for i in range(len(rows))], values, 0.4, label=name)
    axis.set_xticks(range(len(rows)), [row[0] for row in rows], fontsize=8)
    axis.set_ylabel(label)
    axis.set_title(table.title, fontsize=10)
    axis.legend()
    _save(figure, path)


def _bars(table: tables.Table, path: Path) -> None:
    """Draw one stack for the paper and one for ours at each size."""
    sizes = list(dict.fromkeys(row[0] for row in table.rows))
    parts = [part for part in dict.fromkeys(row[1] for row in table.rows) if part != "sum"]
    value = {(row[0], row[1]): (float(row[3]), float(row[4])) for row in table.rows}
    figure, axis = plt.subplots(figsize=(8, 4.5))
    floor = {(size, side): 0.0 for size in sizes for side in (0, 1)}
    for index, part in enumerate(parts):
        for side in (0, 1):
            heights = [value[size, part][side] for size in sizes]
            at = [i + 0.4 * side - 0.2 for i in range(len(sizes))]
            floors = [floor[size, side] for size in sizes]
            label = part if side == 0 else None
            axis.bar(at, heights, 0.36, bottom=floors, label=label, color=f"C{index}")
            for size, height in zip(sizes, heights, strict=True):
                floor[size, side] += height
    axis.set_xticks(range(len(sizes)), [f"{size}\npaper | ours" for size in sizes])
    axis.set_ylabel("microseconds")
    axis.set_title(table.title, fontsize=10)
    axis.legend(fontsize=7)
    _save(figure, path)


def _line(table: tables.Table, column: int, label: str, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(5, 3.5))
    cores = [int(row[0]) for row in table.rows]
    values = [float(row[column]) for row in table.rows]
    axis.plot(cores, values, "o-")
    axis.set_xscale("log", base=2)
    axis.set_ylim(0, 1.1 * max(values))
    axis.set_xlabel("cores")
    axis.set_ylabel(label)
    axis.set_title(table.title, fontsize=10)
    _save(figure, path)

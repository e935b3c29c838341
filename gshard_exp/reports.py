"""The verb `report`: runs, or what is there of them, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gshard_exp.errors import SettingError
from gshard_exp.look import say

if TYPE_CHECKING:
    from gshard_exp.sweep.laws import Law
    from gshard_exp.sweep.report import Report

PAGE, DATA = "index.html", "report.json"


def add_flags(verb: argparse.ArgumentParser) -> None:
    """Add what `report` understands."""
    verb.add_argument(
        "dir",
        nargs="+",
        metavar="DIR",
        help="the folder of a run (finished or not), of a sweep, or of runs",
    )
    verb.add_argument(
        "--output",
        metavar="DIR",
        help="folder to write; default: DIR/report, below the first DIR that is there",
    )
    verb.add_argument(
        "--reach",
        metavar="A,B",
        help="training cross entropies, in nats per piece, for the table of tokens to reach them; "
        "default: three that all, half and one of the runs reach",
    )
    verb.add_argument(
        "--baselines", metavar="FILE", help="JSON of bilingual scores, for delta BLEU; as of eval"
    )
    verb.add_argument(
        "--smooth",
        type=int,
        metavar="N",
        help="languages to average over by resource; default: a tenth of them, as in the paper",
    )
    verb.add_argument(
        "--published", action="store_true", help="lay the paper's figures beside those of the runs"
    )


def report_verb(arguments: argparse.Namespace, bindings: Sequence[str]) -> int:
    """Write a report of runs, and print its table."""
    from gshard_exp.score.quality import Baselines
    from gshard_exp.sweep import report as reports
    from gshard_exp.sweep import tables

    if bindings:
        raise SettingError(
            f"--gin.{bindings[0]} sets something of an experiment, and a report only reads runs.",
            settings=("gin",),
        )
    if arguments.smooth is not None and arguments.smooth < 1:
        raise SettingError(f"--smooth={arguments.smooth} has to be at least 1.", ("smooth",))
    baselines = None if arguments.baselines is None else Baselines.read(arguments.baselines)
    found = reports.collect(
        arguments.dir, thresholds=_thresholds(arguments.reach), baselines=baselines
    )
    folder = _output(arguments.output, arguments.dir)
    said = write(found, folder, smooth=arguments.smooth, published=arguments.published)
    say(tables.terminal(tables.points(found)))
    for damage in found.damage:
        print(f"warning: {damage.where}: {damage.what}", file=sys.stderr)
    for note in (*found.notes, *said):
        print(f"note: {note}", file=sys.stderr)
    say(f"outputs: {(folder / PAGE).resolve()}")
    return 0


def _output(named: str | None, folders: Sequence[str]) -> Path:
    """Return where the report goes; by default below the first of the folders that is there."""
    from gshard_exp.sweep.report import OUTPUT

    if named:
        return Path(named).expanduser()
    places = [Path(folder).expanduser() for folder in folders]
    return next((place for place in places if place.is_dir()), places[0]) / OUTPUT


def _thresholds(text: str | None) -> list[float] | None:
    if text is None:
        return None
    hint = "--reach=4,3.5,3 for instance."
    try:
        found = [float(word) for word in text.split(",") if word]
    except ValueError:
        raise SettingError(f"--reach={text} is no list of numbers.", ("reach",), hint) from None
    wrong = [f"{value:g}" for value in found if not (math.isfinite(value) and value > 0)]
    if wrong:
        raise SettingError(
            f"--reach={text}: {', '.join(wrong)} is no cross entropy to reach; each has to be "
            "finite and above 0.",
            ("reach",),
            hint,
        )
    return found


def write(
    found: Report, folder: Path, *, smooth: int | None = None, published: bool = False
) -> list[str]:
    """Write page, tables, JSON and plots of a report into a folder.

    Args:
        found: as collected.
        folder: made if it is not there; files of the same names are replaced.
        smooth: languages to average over by resource; None: a tenth.
        published: lay the paper's figures beside.

    Returns:
        What to say of it: fits, and what could not be written.
    """
    from gshard_exp.sweep import charts, heats, laws, page, plots, tables
    from gshard_exp.sweep import published as paper

    drawn = charts.all_charts(found, smooth)
    of_experts = heats.heats(found.runs)
    fitted = laws.all_laws(found)
    contents = page.Content(
        charts=[*drawn, *(paper.charts() if published else ()), *of_experts],
        points=tables.points(found),
        reach=tables.thresholds(found),
        fits=laws.table(fitted),
        settings=tables.settings(found),
        paper=paper.table() if published else None,
        folder=folder,
        plots=plots.available(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    _remove_former(folder)
    files = plots.draw(contents.charts, folder / "plots") if contents.plots else []
    for table in contents.tables:
        text = f"# {table.title}\n\n{table.about}\n\n{tables.markdown(table)}\n"
        for kind, written in (("md", text), ("csv", tables.csv_text(table))):
            files.append(folder / f"{table.name}.{kind}")
            files[-1].write_text(written, "utf-8")
    content = {
        "title": found.title,
        "damage": [dataclasses.asdict(damage) for damage in found.damage],
        "notes": found.notes,
        "waiting": list(found.waiting),
        "files": [file.relative_to(folder).as_posix() for file in files],
        **{table.name: tables.as_objects(table) for table in contents.tables},
    }
    text = json.dumps(content, ensure_ascii=False, indent=1)
    (folder / DATA).write_text(f"{text}\n", "utf-8")
    (folder / PAGE).write_text(page.page(found, contents), "utf-8")
    return _said(fitted, contents.plots)


def _remove_former(folder: Path) -> None:
    """Remove what the report before this one wrote: a plot of a run that is gone would mislead."""
    try:
        files = json.loads((folder / DATA).read_text("utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # there was none, or it is not ours: nothing is removed
    for name in files:
        path = folder / str(name)
        if path.suffix in (".png", ".svg", ".md", ".csv") and folder in path.resolve().parents:
            path.unlink(missing_ok=True)


def _said(fitted: Sequence[Law], plots: bool) -> list[str]:
    done = sum(law.fit is not None for law in fitted)
    lines = [f"{done} power laws fitted, {len(fitted) - done} refused for want of points (fits.md)"]
    if not plots:
        lines.append("no PNG and SVG: they need matplotlib (pip install 'gshard_exp[report]')")
    return lines

"""The report as one HTML file that asks for nothing else: tables, charts, links to the runs."""

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from gshard_exp import __version__
from gshard_exp.sweep.charts import Chart, looks
from gshard_exp.sweep.heats import Heat
from gshard_exp.sweep.report import Report, average, held_out_loss, last, written
from gshard_exp.sweep.runs import CONFIG, METRICS, Run
from gshard_exp.sweep.scores import DELTA, METRIC
from gshard_exp.sweep.tables import Table

# The browser itself then refuses whatever would leave the file.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
HEADS = {
    "loss": "Loss",
    "quality": "Quality against cost",
    "languages": "Languages",
    "experts": "Experts",
}


@dataclasses.dataclass(frozen=True)
class Content:
    """What the page holds besides the runs.

    Attributes:
        charts: in order.
        points: table of runs.
        reach: table of tokens to reach a loss.
        fits: table of laws.
        settings: table of what differs.
        paper: table of the paper's models; None: not asked for.
        folder: the page lies in; links are relative to it.
        plots: whether `plots/NAME.png` and `.svg` lie beside it.
    """

    charts: Sequence[Chart | Heat]
    points: Table
    reach: Table
    fits: Table
    settings: Table
    paper: Table | None
    folder: Path
    plots: bool

    @property
    def tables(self) -> list[Table]:
        """All tables, in order."""
        every = (self.points, self.reach, self.fits, self.settings, self.paper)
        return [table for table in every if table is not None]


def page(report: Report, content: Content) -> str:
    """Write the page."""
    look = looks(report.runs)
    runs = [
        {"name": run.name, "colour": look[run.name][0], "shape": look[run.name][1]}
        for run in report.runs
    ]
    data = {"runs": runs, "charts": [dataclasses.asdict(chart) for chart in content.charts]}
    # `</script>` in a run's name would end the element that holds the data.
    packed = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("</", "<\\/")
    parts = {
        "points": _section("points", "Points", _points(report, content)),
        **{name: _charts(name, report, content) for name in HEADS},
        "fits": _section("fits", "Fitted laws", _table(content.fits, wrap=True)),
        "settings": _settings(content.settings),
        "paper": "" if content.paper is None else _paper(content.paper),
    }
    titles = {"points": "Points", **HEADS, "fits": "Fits", "settings": "Settings", "paper": "Paper"}
    nav = "".join(f'<a href="#{name}">{titles[name]}</a>' for name, html in parts.items() if html)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(report.title)}: report</title>",
            f"<style>\n{_asset('report.css')}</style></head><body>",
            f"<header><div><h1>{escape(report.title)}</h1>",
            '<button type="button" id="theme" aria-label="Switch between light and dark"></button>',
            f'<nav aria-label="Sections">{nav}</nav></div></header>',
            _shared_legend(report),
            f"<main>{_tiles(report)}{_callouts(report)}",
            *parts.values(),
            f"<footer>Written by gshard_exp {escape(__version__)}. Colours and marks are the same "
            "in every chart; the legend hides a run in all of them.</footer></main>",
            '<div id="tip" role="status" aria-live="polite" hidden></div>',
            f'<script type="application/json" id="data">{packed}</script>',
            f"<script>\n{_asset('report.js')}</script></body></html>\n",
        ]
    )


def _asset(name: str) -> str:
    return (resources.files("gshard_exp.sweep") / name).read_text("utf-8")


def _shared_legend(report: Report) -> str:
    if len(report.runs) < 2:
        return ""
    return (
        '<div class="bar-top"><div class="legend" id="legend" role="group" '
        'aria-label="Runs to show"></div></div>'
    )


def _tiles(report: Report) -> str:
    done = sum(run.status == "done" for run in report.runs)
    total = len(report.runs) + len(report.waiting)
    tiles = [(f"{done} of {total}", "runs are done" if total > 1 else "run is done")]
    tiles += _best(report, "lowest cross entropy", lambda run: last(run.curve))
    tiles += _best(report, "lowest held-out loss", held_out_loss)
    tiles += _best(report, "highest BLEU", lambda run: average(run, METRIC), high=True, form=".2f")
    tiles += _best(report, "highest delta BLEU", lambda run: average(run, DELTA), True, "+.2f")
    hours = [run.core_hours for run in report.runs if run.core_hours]
    if hours:
        tiles.append((f"{sum(hours):.3g}", "core-hours in all"))
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _best(
    report: Report,
    label: str,
    of: Callable[[Run], float | None],
    high: bool = False,
    form: str = ".3f",
) -> list[tuple[str, str]]:
    known = [(value, run.name) for run in report.runs if (value := of(run)) is not None]
    if not known:
        return []
    value, name = max(known) if high else min(known)
    return [(written(value, form), f"{label}: {name}" if len(report.runs) > 1 else label)]


def _callouts(report: Report) -> str:
    found = ""
    if report.damage:
        items = "".join(
            f"<li><b>{escape(d.where)}</b>: {escape(d.what)}</li>" for d in report.damage
        )
        found += (
            '<div class="callout" id="damage" role="note"><b>What could not be read; the rest is '
            f"reported</b><ul>{items}</ul></div>"
        )
    notes = [*report.notes]
    if report.waiting:
        notes.append(f"Points without a run yet: {', '.join(report.waiting)}.")
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        found += f'<div class="callout plain" role="note"><ul>{items}</ul></div>'
    return found


def _section(name: str, head: str, html: str) -> str:
    return f'<section id="{name}"><h2>{escape(head)}</h2>{html}</section>'


def _points(report: Report, content: Content) -> str:
    """Write the table of runs, with links to their folders and files."""
    links, files = {}, {}
    for run in report.runs:
        place = _url(os.path.relpath(run.folder.resolve(), content.folder.resolve()))
        links[run.name] = f'<a href="{place}/">{escape(run.name)}</a>'
        files[run.name] = " ".join(
            f'<a href="{place}/{file}">{label}</a>'
            for file, label in ((CONFIG, "config"), (METRICS, "metrics"))
            if (run.folder / file).is_file()
        )
    damaged = {damage.where for damage in report.damage}
    html = _table(content.points, links=links, files=files, marked=damaged, sortable=True)
    return f"{html}{_downloads('points.csv', 'points.md', 'report.json')}"


def _url(path: str) -> str:
    return escape(quote(Path(path).as_posix()))


def _downloads(*files: str) -> str:
    links = " ".join(f'<a href="{file}">{file}</a>' for file in files)
    return f'<p class="files">{links}</p>'


def _table(
    table: Table,
    *,
    links: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    marked: Collection[str] = (),
    sortable: bool = False,
    wrap: bool = False,
) -> str:
    """Write a table: first cells as heads of their rows, values behind the text for sorting."""

    def head(text: str) -> str:
        inner = escape(text)
        inner = f'<button type="button">{inner}</button>' if sortable else inner
        return f'<th scope="col">{inner}</th>'

    body = []
    for row, values in zip(table.rows, table.values, strict=True):
        first = (links or {}).get(row[0], escape(row[0]))
        if row[0] in marked:
            first += ' <span title="something could not be read">&#9888;</span>'
        cells = "".join(
            f'<td data-value="{escape("" if value is None else str(value))}">{escape(text)}</td>'
            for text, value in zip(row[1:], values[1:], strict=True)
        )
        if files:
            cells += f"<td>{files[row[0]]}</td>"
        body.append(f'<tr><th scope="row" data-value="{escape(row[0])}">{first}</th>{cells}</tr>')
    kinds = " ".join(["sortable"] * sortable + ["wrap"] * wrap)
    about = f"<p>{escape(table.about)}</p>" if table.about else ""
    heads = "".join(map(head, table.heads)) + ('<th scope="col">files</th>' if files else "")
    label = escape(table.title)
    return (
        f'{about}<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="{kinds}" id="table-{table.name}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _charts(section: str, report: Report, content: Content) -> str:
    charts = _in_order([chart for chart in content.charts if chart.section == section])
    if not charts:
        return ""
    html = "".join(_figure(chart, content, report) for chart in charts)
    html = f'<div class="charts">{html}</div>'
    names = list(dict.fromkeys(chart.run for chart in charts if isinstance(chart, Heat)))
    if len(names) > 1:
        options = "".join(f"<option>{escape(name)}</option>" for name in names)
        label = f'<label>Run: <select id="which-run">{options}</select></label>'
        html = f"<p>{label}</p>{html}"
    if section == "loss" and content.reach.rows and len(content.reach.heads) > 1:
        html += f"<h3>{escape(content.reach.title)}</h3>{_table(content.reach)}"
    return _section(section, HEADS[section], html)


def _in_order(charts: Sequence[Chart | Heat]) -> list[Chart | Heat]:
    """Put each chart that is to stand beside another right after that."""
    names = [chart.name for chart in charts]

    def place(index: int) -> float:
        other = getattr(charts[index], "beside", "")
        return names.index(other) + 0.5 if other in names else index

    return [charts[index] for index in sorted(range(len(charts)), key=place)]


def _figure(chart: Chart | Heat, content: Content, report: Report) -> str:
    known = {run.name for run in report.runs}
    own = isinstance(chart, Chart) and not {series.name for series in chart.series} <= known
    # The first of a pair begins a row, so that the two stand side by side.
    paired = any(getattr(other, "beside", "") == chart.name for other in content.charts)
    first = ' class="first"' if paired else ""
    run = f' data-run="{escape(chart.run)}"' if isinstance(chart, Heat) else ""
    files = ""
    if content.plots:
        place = _url(f"plots/{chart.name}")
        files = f'<a href="{place}.png">PNG</a><a href="{place}.svg">SVG</a>'
    legend = '<div class="legend" role="group" aria-label="Series to show"></div>' if own else ""
    return (
        f'<figure data-chart="{escape(chart.name)}"{run}{first}><figcaption>'
        f"<h3>{escape(chart.title)}</h3><p>{escape(chart.about)}</p></figcaption>{legend}"
        '<div class="plot"></div><div class="foot files"><details><summary>Values</summary>'
        f'<div class="scroll" tabindex="0"></div></details>{files}</div></figure>'
    )


def _settings(table: Table) -> str:
    if len(table.heads) < 3:
        return ""
    html = _table(table, wrap=True) if table.rows else "<p>The runs' settings are the same.</p>"
    return _section("settings", table.title, html)


def _paper(table: Table) -> str:
    return _section("paper", table.title, _table(table))

"""Every chart of a report as PNG and SVG, through matplotlib."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gshard_exp.sweep.charts import Chart, Series
from gshard_exp.sweep.heats import Heat
from gshard_exp.sweep.report import si

# Of the page's light theme, in its order (report.css).
COLOURS = (
    "#2a78d6",
    "#eb6834",
    "#1baf7a",
    "#4a3aa7",
    "#e34948",
    "#eda100",
    "#008300",
    "#e87ba4",
)
MARKS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (9, 3)),
    (0, (3, 3)),
)
INK, QUIET, GRID = "#0b0b0b", "#52514e", "#e1e0d9"
MANY_NAMES = 6  # above which the legend stands beside the plot
KINDS = ("png", "svg")


def available() -> bool:
    """Say whether matplotlib is installed."""
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def draw(charts: Sequence[Chart | Heat], folder: Path) -> list[Path]:
    """Write each chart as PNG and SVG; return the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, rc_context

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    # The same charts give the same bytes: no date, and ids that do not change.
    with rc_context({"svg.hashsalt": "gshard_exp", "font.size": 9, "axes.edgecolor": GRID}):
        for chart in charts:
            figure = _heat(chart, pyplot) if isinstance(chart, Heat) else _lines(chart, pyplot)
            figure.draw_without_rendering()  # lays out once, for both files
            figure.set_layout_engine("none")
            for kind in KINDS:
                files.append(folder / f"{chart.name}.{kind}")
                metadata = {"Date": None} if kind == "svg" else {}
                figure.savefig(files[-1], dpi=150, metadata=metadata)
            pyplot.close(figure)
    return files


def _lines(chart: Chart, pyplot: Any) -> Any:
    figure, axis = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for series in chart.series:
        _add(series, axis)
    if chart.x.log:
        axis.set_xscale("log")
        axis.set_xticks(*log_ticks(*axis.get_xlim()))
        axis.minorticks_off()
    if chart.y.log:
        axis.set_yscale("log")
        axis.set_yticks(*log_ticks(*axis.get_ylim()))
        axis.minorticks_off()
    axis.set_xlabel(chart.x.label, color=QUIET)
    axis.set_ylabel(chart.y.label, color=QUIET)
    axis.set_title(chart.title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axis.grid(True, color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(colors=QUIET, length=0)
    axis.spines[["top", "right"]].set_visible(False)
    if len(chart.series) > MANY_NAMES:
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    elif len(chart.series) > 1:
        axis.legend(frameon=False, fontsize=8)
    return figure


def log_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Choose ticks of a logarithmic axis and write them as the page does: 30K, not 3 x 10^4."""
    from matplotlib.ticker import MaxNLocator

    decades = math.log10(high / low)
    within = (1,) if decades > 5 else (1, 3) if decades > 1.3 else (1, 1.5, 2, 3, 5, 7)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**power for power in powers for m in within]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) < 2:
        ticks = [t for t in MaxNLocator(5).tick_values(low, high) if max(low, 0) < t <= high]
    return ticks, [f"{si(tick, 4)}" for tick in ticks]


def _add(series: Series, axis: Any) -> None:
    colour, shape = COLOURS[series.colour], series.shape
    xs, ys = zip(*series.points, strict=True)
    lonely = not series.line or len(xs) == 1
    axis.plot(
        xs,
        ys,
        color=colour,
        label=series.name,
        linewidth=1.8,
        linestyle="none" if lonely else DASHES[shape],
        marker=MARKS[shape] if lonely or len(xs) <= 12 else None,
        markersize=6 if lonely else 4,
        markeredgecolor="white",
        markeredgewidth=0.8,
    )


def _heat(chart: Heat, pyplot: Any) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
    from matplotlib.ticker import PercentFormatter

    rows = len(chart.rows)
    figure, axis = pyplot.subplots(figsize=(7.2, 1.5 + 0.28 * rows), layout="constrained")
    values = [[float("nan") if v is None else v for v in row] for row in chart.values]
    top = max((v for row in chart.values for v in row if v is not None), default=0.0)
    extent: dict[str, Any]
    if chart.middle is None:
        ramp, extent = ("#f3f2ee", "#2a78d6", "#0d366b"), {"vmin": 0.0, "vmax": top or 1.0}
    else:
        ramp = ("#1c5cab", "#f0efec", "#c93a39")
        extent = {"norm": TwoSlopeNorm(chart.middle, 0.0, max(top, 2 * chart.middle))}
    colours = LinearSegmentedColormap.from_list("report", ramp)
    image = axis.imshow(values, aspect="auto", cmap=colours, **extent)
    axis.set_yticks(range(rows), chart.rows)
    every = max(1, -(-len(chart.columns) // 12))
    axis.set_xticks(range(0, len(chart.columns), every), chart.columns[::every])
    axis.set_xlabel(chart.column_label, color=QUIET)
    title = f"{chart.title}: {chart.run}"
    axis.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axis.tick_params(colors=QUIET, length=0)
    axis.spines[:].set_visible(False)
    digits = 0 if top >= 0.05 else 1
    percent = PercentFormatter(1.0, decimals=digits) if chart.unit == "%" else None
    figure.colorbar(image, ax=axis, format=percent, pad=0.01)
    return figure

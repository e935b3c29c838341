"""What the report draws, as data: the page and matplotlib draw the same charts."""

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

from gshard_exp.sweep.report import Report, average, si, tokens_to_reach
from gshard_exp.sweep.runs import Run
from gshard_exp.sweep.scores import DELTA, METRIC

COLOURS, SHAPES = 8, 6  # that a reader tells apart
MOST_POINTS = 400  # of a curve; more would not be seen
WINDOW = 10  # languages of the paper's hundred that Figure 6 averages over
WORK = "loss_flops"
NAMES = {METRIC: "BLEU", DELTA: "delta BLEU"}


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis: its label with the unit, and whether it is logarithmic."""

    label: str
    log: bool = False


@dataclasses.dataclass(frozen=True)
class Series:
    """Marks that belong together.

    Attributes:
        name: of the run; a legend hides all series of that name.
        points: (x, y).
        colour: 0 to `COLOURS` - 1.
        shape: 0 to `SHAPES` - 1, of marks and dashes.
        line: join the points, in their order, or mark each.
        notes: what to say of each point besides its place; empty, or one a point.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    shape: int
    line: bool = True
    notes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines or marks over two axes.

    Attributes:
        name: of its files.
        title: what it shows.
        about: how the values were made.
        x: axis.
        y: axis.
        series: at least one with a point.
        section: of the page.
        beside: name of the chart that it is to stand next to.
    """

    name: str
    title: str
    about: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    section: str
    beside: str = ""


def looks(runs: Sequence[Run]) -> dict[str, tuple[int, int]]:
    """Give each run a colour and a shape that stay its own in every chart.

    Points of one sweep over two axes or more take the colour from the axis of most values, and the
    shape from the rest, so that a series of depths or of experts can be followed by eye.
    """
    axes = dict.fromkeys(axis for run in runs for axis in run.axes)
    values = {a: list(dict.fromkeys(str(run.axes.get(a)) for run in runs)) for a in axes}
    many = max(axes, key=lambda axis: len(values[axis]), default=None)
    rests = list(dict.fromkeys(_rest(run, many) for run in runs))
    if many is not None and 1 < len(rests) <= SHAPES and len(values[many]) <= COLOURS:
        look = {
            run.name: (values[many].index(str(run.axes.get(many))), rests.index(_rest(run, many)))
            for run in runs
        }
        if len(set(look.values())) == len(runs):  # not where two sweeps have a point of one name
            return look
    return {run.name: (i % COLOURS, i // COLOURS % SHAPES) for i, run in enumerate(runs)}


def _rest(run: Run, axis: str | None) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in sorted(run.axes.items()) if key != axis)


def all_charts(report: Report, window: int | None = None) -> list[Chart]:
    """Make every chart with two axes that the runs have something for.

    Args:
        report: see `collect`.
        window: languages to average over by resource; None: see `smoothing_window`.
    """
    look = looks(report.runs)
    losses = _losses(report, look)
    return [
        *(chart for chart in losses if chart.name != WORK),
        *_reaching(report, look),
        *(chart for chart in losses if chart.name == WORK),
        *_by_cost(report, look),
        *_by_language(report, look, window),
    ]


def _losses(report: Report, look: Mapping[str, tuple[int, int]]) -> list[Chart]:
    tokens = Axis("tokens seen, both sides, without padding", log=True)
    nats = Axis(f"cross entropy, {units(report)}")
    about = "Mean over the steps between two lines of metrics; losses of the routers left out."
    found = [
        (
            "loss",
            "Training loss against tokens",
            about,
            tokens,
            {r.name: r.curve for r in report.runs},
        ),
        (
            "held_out_loss",
            "Held-out loss against tokens",
            "Teacher-forced, on validation text, before training and whenever it was measured.",
            tokens,
            {r.name: [p for p in r.held_out_curve if p[0] > 0] for r in report.runs},
        ),
        (
            WORK,
            "Training loss against work",
            "Useful operations of forward and backward passes, worked out from the settings. "
            f"{about}",
            Axis("floating-point operations of training", log=True),
            {r.name: _by_flops(r) for r in report.runs},
        ),
    ]
    charts = []
    for name, title, told, x, curves in found:
        series = [
            Series(run, thinned(curve), *look[run], line=True)
            for run, curve in curves.items()
            if curve
        ]
        if series:
            charts.append(Chart(name, title, told, x, nats, series, "loss"))
    return charts


def units(report: Report) -> str:
    """Name the unit of the runs' cross entropy: nats per target piece, for translation."""
    of_runs = dict.fromkeys(run.unit for run in report.runs)
    return f"nats per {' or '.join(of_runs)}"


def _by_flops(run: Run) -> list[tuple[float, float]]:
    """Return the training curve over useful operations instead of tokens."""
    if not run.flops or not run.tokens:
        return []
    each = run.flops / run.tokens  # batches are full alike: tokens and steps go together
    return [(tokens * each, loss) for tokens, loss in run.curve]


def _reaching(report: Report, look: Mapping[str, tuple[int, int]]) -> list[Chart]:
    """Draw Table 2: tokens to reach a cross entropy."""
    series = []
    for run in report.runs:
        reached = [(t, tokens_to_reach(run.curve, t)) for t in report.thresholds]
        points = [(t, tokens) for t, tokens in reached if tokens]
        if points:
            series.append(Series(run.name, points, *look[run.name], line=False))
    if not series:
        return []
    about = (
        "The first time that the training loss is at or below; see the table (the paper's Table 2)."
    )
    y = Axis("tokens", log=True)
    x = Axis(f"cross entropy to reach, {units(report)}")
    return [Chart("tokens_to_reach", "Tokens to reach a loss", about, x, y, series, "loss")]


def _by_cost(report: Report, look: Mapping[str, tuple[int, int]]) -> list[Chart]:
    """Draw Figure 1: quality against cost, measured (core-hours) and worked out (FLOPs)."""
    costs = (
        ("core_hours", "core-hours", "as the runs recorded them, evaluation included"),
        ("flops", "floating-point operations of training", "worked out from the settings"),
    )
    charts = []
    for key, label, told in costs:
        for metric in (METRIC, DELTA):
            series = []
            for run in report.runs:
                cost, score = getattr(run, key), average(run, metric)
                if cost and score is not None and run.scores is not None:
                    note = f"{run.scores.kind}, step {run.scores.step}"
                    points = [(cost, score)]
                    series.append(
                        Series(run.name, points, *look[run.name], line=False, notes=[note])
                    )
            if series:
                title = f"Average {NAMES[metric]} against {label.split(' of')[0]}"
                about = f"Mean over languages; cost {told} (the paper's Figure 1)."
                y = Axis(f"{NAMES[metric]}, mean over languages")
                charts.append(
                    Chart(f"{metric}_{key}", title, about, Axis(label, True), y, series, "quality")
                )
    return charts


def smoothing_window(languages: int) -> int:
    """Return the languages to average over: a tenth, as of the paper's hundred, at most ten."""
    return max(1, min(WINDOW, round(languages / 10)))


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Average over every `window` neighbours: 91 values of 100 with a window of 10 (facts A5)."""
    return [
        sum(values[start : start + window]) / window for start in range(len(values) - window + 1)
    ]


def _by_language(
    report: Report, look: Mapping[str, tuple[int, int]], window: int | None
) -> list[Chart]:
    """Draw Figure 6: quality by language, from high to low resource."""
    charts = []
    for metric in (DELTA, METRIC):
        series, windows = [], set()
        for run in report.runs:
            rows = run.scores.languages if run.scores else {}
            known = [(code, row[metric]) for code, row in rows.items() if metric in row]
            if not known:
                continue
            wide = min(window or smoothing_window(len(known)), len(known))
            windows.add(wide)
            series.append(_smoothed(run, known, wide, look[run.name]))
        if not series:
            continue
        wide_text = "/".join(map(str, sorted(windows)))
        about = (
            f"Each value is the mean of {wide_text} languages next to each other by training "
            "pairs (the paper's Figure 6: 10 of 100)."
            if windows != {1}
            else "One value a language, by training pairs."
        )
        x = Axis("languages, from most to fewest training pairs, %")
        charts.append(
            Chart(
                f"{metric}_by_language",
                f"{NAMES[metric][0].upper()}{NAMES[metric][1:]} by language",
                about,
                x,
                Axis(NAMES[metric]),
                series,
                "languages",
            )
        )
    return charts


def _smoothed(
    run: Run, known: Sequence[tuple[str, float]], window: int, look: tuple[int, int]
) -> Series:
    means = moving_mean([value for _, value in known], window)
    points, notes = [], []
    for start, mean in enumerate(means):
        members = [code for code, _ in known[start : start + window]]
        # The middle of the window, on a scale that does not depend on how many languages there are.
        points.append((100 * (start + window / 2) / len(known), mean))
        pairs = [run.pairs[code] for code in members if code in run.pairs]
        size = f" ({si(min(pairs))} to {si(max(pairs))} pairs)" if len(pairs) > 1 else ""
        size = f" ({si(pairs[0])} pairs)" if len(pairs) == 1 else size
        notes.append(", ".join(members) + size)
    return Series(run.name, points, *look, line=True, notes=notes)


def thinned(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Take at most `MOST_POINTS` points of a curve, evenly on a logarithmic scale of x."""
    if len(curve) <= MOST_POINTS:
        return list(curve)
    xs = [x for x, _ in curve]
    ratio = xs[-1] / xs[0]
    at = [xs[0] * ratio ** (i / (MOST_POINTS - 1)) for i in range(MOST_POINTS)]
    chosen = {min(bisect.bisect_left(xs, x), len(xs) - 1) for x in at} | {len(xs) - 1}
    return [curve[i] for i in sorted(chosen)]

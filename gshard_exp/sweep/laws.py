"""Which power laws a report fits to its runs, and the table of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gshard_exp.sweep.fits import Fit, TooFewPoints, fit
from gshard_exp.sweep.report import Points, Report, si, written
from gshard_exp.sweep.runs import Run
from gshard_exp.sweep.tables import Table

WARM_UP = 0.1  # share of a run's tokens that no law is fitted to: there the learning rate rises
HELD_OUT = 0.2  # share of a curve, its end, that is predicted from the rest
CURVE_POINTS = 40  # of a run that enter a fit, evenly over log tokens
SIZES = {"active": "active parameters", "total": "all parameters"}


@dataclasses.dataclass(frozen=True)
class Law:
    """A fit that was tried.

    Attributes:
        what: whose loss.
        form: variables and whether with an asymptote.
        fit: what came out; None: refused.
        refusal: why; empty if it was fitted.
    """

    what: str
    form: str
    fit: Fit | None
    refusal: str = ""


def all_laws(report: Report) -> list[Law]:
    """Fit loss in tokens (each run), in parameters (at equal tokens) and in both (all runs).

    Loss is the training cross entropy. The last fifth of a curve is predicted from the rest; of
    laws across runs each run is predicted from the others.
    """
    curves = {run.name: after_warm_up(run.curve) for run in report.runs}
    laws = []
    for name, curve in curves.items():
        x, loss = {"tokens": [n for n, _ in curve]}, [y for _, y in curve]
        laws += _both_ways(name, x, loss, extrapolate=HELD_OUT)
    laws += _in_size(report.runs)
    for size, label in SIZES.items():
        points = [
            (getattr(run.model, size), tokens, loss, run.name)
            for run in report.runs
            if getattr(run.model, size)
            for tokens, loss in curves[run.name]
        ]
        if points:
            sizes, tokens, losses, names = zip(*points, strict=True)
            both = {label: sizes, "tokens": tokens}
            laws += _both_ways("all runs", both, losses, groups=names)
    return laws


def after_warm_up(curve: Points) -> list[tuple[float, float]]:
    """Leave out a curve's first tenth of tokens, and take points evenly over log tokens."""
    kept = [point for point in curve if point[0] >= WARM_UP * curve[-1][0]]
    if len(kept) <= CURVE_POINTS:
        return kept
    tokens = [point[0] for point in kept]
    at = np.searchsorted(tokens, np.geomspace(tokens[0], tokens[-1], CURVE_POINTS) * (1 - 1e-9))
    return [kept[i] for i in np.unique(at)]


def loss_at(curve: Points, tokens: float) -> float:
    """Return the loss of a curve at some tokens; between two logged steps on a straight line."""
    seen, losses = zip(*curve, strict=True)
    return float(np.interp(tokens, seen, losses))


def _in_size(runs: Sequence[Run]) -> list[Law]:
    """Fit loss in the size of the model, at the tokens that every run has seen."""
    measured = [run for run in runs if run.curve]
    if len(measured) < 2:
        return []
    tokens = min(run.curve[-1][0] for run in measured)
    laws = []
    for size, label in SIZES.items():
        known = [run for run in measured if getattr(run.model, size)]
        sizes = [getattr(run.model, size) for run in known]
        losses = [loss_at(run.curve, tokens) for run in known]
        laws += _both_ways(f"all runs at {si(tokens)} tokens", {label: sizes}, losses)
    return laws


def _both_ways(
    what: str, x: Mapping[str, Sequence[float]], loss: Sequence[float], **how: Any
) -> list[Law]:
    """Fit without and with an asymptote; say why where that means nothing."""
    laws = []
    for asymptote in (False, True):
        form = f"{' and '.join(x)}{', with asymptote' if asymptote else ''}"
        try:
            laws.append(Law(what, form, fit(x, loss, asymptote=asymptote, **how)))
        except TooFewPoints as refusal:
            laws.append(Law(what, form, None, str(refusal)))
    return laws


def table(laws: Sequence[Law]) -> Table:
    """Tabulate laws: form, exponents and asymptote with intervals, errors."""
    heads = ("runs", "loss in", "law", "95 % intervals", "points", "error", "held-out error")
    keys = ("runs", "form", "law", "intervals", "points", "error", "held_out_error")
    values: list[tuple[Any, ...]] = []
    for law in laws:
        if law.fit is None:
            values.append((law.what, law.form, f"not fitted: {law.refusal}", *[None] * 4))
            continue
        found = law.fit
        intervals = "; ".join(
            f"{name if name == 'asymptote' else f'exponent of {name}'} {low:.3f} to {high:.3f}"
            for name, (low, high) in found.intervals.items()
        )
        errors = (found.error, found.held_out)
        values.append((law.what, law.form, str(found.law), intervals, found.points, *errors))
    forms = ("", "", "", "", "", "%", "%")
    rows = [tuple(map(written, row, forms)) for row in values]
    about = (
        "Training cross entropy, without the first tenth of a run's tokens; least squares in log "
        "loss. Intervals: bootstrap of the errors, for curves rather too narrow. Held-out error: "
        "of a run's curve the last fifth, predicted from the rest; across runs each run, predicted "
        "from the others. Where points have one seed, what another would give is in no interval."
    )
    return Table("fits", "Fitted power laws", heads, keys, rows, values, about)

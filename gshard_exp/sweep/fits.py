"""Fits power laws: loss = asymptote + sum of coefficient_i * x_i ** -exponent_i.

Residuals are those of log loss, so that an error of one per cent weighs the same everywhere. With
one variable and no asymptote this is a straight line on logarithmic axes. The sum of a term in
parameters and one in tokens is the form of Hoffmann et al. (arXiv 2203.15556), equation 2; the
paper itself fits nothing.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from gshard_exp.errors import SettingError

SPARE = 2  # points beyond the number of parameters, without which a fit says nothing
LEAST_SPAN = 1.5  # ratio of the largest to the smallest value of a variable
STEEPEST = 10.0  # exponent
STARTS = (0.05, 0.2, 0.5, 1.5)  # exponents from which the search starts
RESAMPLES, SEED = 200, 0
INTERVAL = (2.5, 97.5)  # percentiles


class TooFewPoints(SettingError):
    """There are not enough points, or they lie too close, to fit a law."""


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """A fitted law.

    Attributes:
        names: of variables.
        coefficients: one a variable.
        exponents: one a variable; positive where more means less loss.
        asymptote: loss that no amount of these variables gets below; None: left out.
    """

    names: tuple[str, ...]
    coefficients: tuple[float, ...]
    exponents: tuple[float, ...]
    asymptote: float | None

    def __call__(self, x_NV: np.ndarray) -> np.ndarray:
        """Predict losses [N] of points [N, variables]."""
        terms = np.array(self.coefficients) * np.asarray(x_NV, float) ** -np.array(self.exponents)
        return terms.sum(axis=1) + (self.asymptote or 0.0)

    def __str__(self) -> str:
        terms = [
            f"{c:.3g} {name}^{-a:.3f}"
            for name, c, a in zip(self.names, self.coefficients, self.exponents, strict=True)
        ]
        start = [] if self.asymptote is None else [f"{self.asymptote:.3f}"]
        return " + ".join(start + terms)

    @property
    def values(self) -> dict[str, float]:
        """Exponents by variable, and the asymptote where there is one."""
        found = dict(zip(self.names, self.exponents, strict=True))
        return found if self.asymptote is None else {**found, "asymptote": self.asymptote}


@dataclasses.dataclass(frozen=True)
class Fit:
    """A law and how far to trust it.

    Attributes:
        law: of all points.
        points: number of them.
        error: root mean square of log(loss / prediction), over the points that were fitted.
        held_out: the same over points that were left out of the fit (see `fit`).
        intervals: 95 % intervals of exponents and asymptote, by name, from a bootstrap.
    """

    law: PowerLaw
    points: int
    error: float
    held_out: float
    intervals: Mapping[str, tuple[float, float]]


def fit(
    x: Mapping[str, Sequence[float]],
    loss: Sequence[float],
    *,
    asymptote: bool,
    groups: Sequence[str] | None = None,
    extrapolate: float | None = None,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Fit:
    """Fit a power law.

    Intervals come from refits to the law's predictions times the errors that it makes, drawn with
    replacement: stretches of neighbours of a curve, whose errors are alike; as many neighbours as a
    group has points, since a run as a whole lies above or below the law; single ones otherwise. Of
    a curve of some 40 points whose neighbouring errors are correlated (by 0.5) they hold the truth
    in about three of four cases, not 95 %: read them as the least that is uncertain. They say
    nothing of whether the form of the law is right; the held-out error does.

    Args:
        x: values of each variable, one a point.
        loss: of each point.
        asymptote: whether the loss may level off.
        groups: whose points lie side by side and are left out together (a run's); None: each point
            is alone.
        extrapolate: the points are one curve, by rising x: hold out this share of them, the last.
            None: leave out each group in turn.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        TooFewPoints: with how many it would take.
    """
    names = tuple(x)
    x_NV = np.stack([np.asarray(x[name], float) for name in names], axis=1)
    loss_N = np.asarray(loss, float)
    _check(names, x_NV, loss_N, asymptote)
    law = _solve(names, x_NV, loss_N, asymptote)
    if extrapolate is not None:
        kept = len(loss_N) - max(1, round(extrapolate * len(loss_N)))
        _check(names, x_NV[:kept], loss_N[:kept], asymptote)
        part = _solve(names, x_NV[:kept], loss_N[:kept], asymptote)
        held_out_N = _errors(part, x_NV[kept:], loss_N[kept:])
    else:
        held_out_N = _left_out(names, x_NV, loss_N, asymptote, groups, law)
    block = _block(len(loss_N), groups, is_curve=extrapolate is not None)
    intervals = _intervals(law, x_NV, loss_N, block, resamples, np.random.default_rng(seed))
    return Fit(law, len(loss_N), _rms(_errors(law, x_NV, loss_N)), _rms(held_out_N), intervals)


def _check(names: tuple[str, ...], x_NV: np.ndarray, loss_N: np.ndarray, asymptote: bool) -> None:
    """Refuse what any law would fit."""
    if not (np.isfinite(x_NV).all() and (x_NV > 0).all() and (loss_N > 0).all()):
        raise TooFewPoints("a power law needs losses and variables above 0 at every point.")
    free = 2 * len(names) + asymptote
    if len(loss_N) < free + SPARE:
        raise TooFewPoints(
            f"{len(loss_N)} points are too few for a law of {free} numbers: it takes at least "
            f"{free + SPARE}."
        )
    for name, values in zip(names, x_NV.T, strict=True):
        distinct, needed = len(np.unique(values)), 3 + asymptote
        if distinct < needed:
            raise TooFewPoints(
                f"{distinct} different values of {name} are too few: it takes at least {needed}."
            )
        if values.max() / values.min() < LEAST_SPAN:
            raise TooFewPoints(
                f"the values of {name} lie within a factor of {values.max() / values.min():.2f}: "
                f"it takes at least {LEAST_SPAN}."
            )


def _solve(
    names: tuple[str, ...],
    x_NV: np.ndarray,
    loss_N: np.ndarray,
    asymptote: bool,
    near: PowerLaw | None = None,
) -> PowerLaw:
    """Find the law of least squares in log loss; `near` saves the search for a start."""
    if len(names) == 1 and not asymptote:
        slope, height = np.polyfit(np.log(x_NV[:, 0]), np.log(loss_N), 1)
        return PowerLaw(names, (float(np.exp(height)),), (float(-slope),), None)
    from scipy.optimize import least_squares

    count = len(names)
    # About their middle the terms' sizes and exponents are all but independent.
    middle_V = np.exp(np.log(x_NV).mean(axis=0))
    log_x_NV = np.log(x_NV / middle_V)

    def law_of(free: np.ndarray) -> PowerLaw:
        sizes, exponents = np.exp(free[:count]), free[count : 2 * count]
        coefficients = sizes * middle_V**exponents
        level = float(free[-1]) if asymptote else None
        return PowerLaw(names, tuple(map(float, coefficients)), tuple(map(float, exponents)), level)

    def residuals(free: np.ndarray) -> np.ndarray:
        terms_NV = np.exp(free[None, :count] - log_x_NV * free[None, count : 2 * count])
        level = free[-1] if asymptote else 0.0
        return np.log(terms_NV.sum(axis=1) + level) - np.log(loss_N)

    top = float(loss_N.min())
    low = [-50.0] * count + [0.0] * count + [0.0] * asymptote
    high = [50.0] * count + [STEEPEST] * count + [top] * asymptote
    starts = _starts(loss_N, count, asymptote, middle_V, near)
    found = [
        least_squares(residuals, start, bounds=(low, high), x_scale="jac", max_nfev=300)
        for start in starts
    ]
    return law_of(min(found, key=lambda solution: solution.cost).x)


def _starts(
    loss_N: np.ndarray, count: int, asymptote: bool, middle_V: np.ndarray, near: PowerLaw | None
) -> list[list[float]]:
    """List where to search from: (log sizes of terms, exponents, asymptote)."""
    top = float(loss_N.min())
    if near is not None:
        exponents = np.clip(near.exponents, 1e-6, STEEPEST - 0.1)
        sizes = np.array(near.coefficients) * middle_V ** -np.array(near.exponents)
        sizes = np.log(np.clip(sizes, 1e-20, 1e20))
        level = [min(near.asymptote or 0.0, 0.999 * top)] * asymptote
        return [[*sizes, *exponents, *level]]
    share = float(loss_N.mean()) / (count + asymptote)
    levels = (0.1 * top, 0.9 * top) if asymptote else (0.0,)
    return [
        [*[np.log(share)] * count, *[exponent] * count, *[level] * asymptote]
        for exponent in STARTS
        for level in levels
    ]


def _errors(law: PowerLaw, x_NV: np.ndarray, loss_N: np.ndarray) -> np.ndarray:
    return np.log(loss_N / law(x_NV))


def _rms(values_N: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values_N**2)))


def _left_out(
    names: tuple[str, ...],
    x_NV: np.ndarray,
    loss_N: np.ndarray,
    asymptote: bool,
    groups: Sequence[str] | None,
    law: PowerLaw,
) -> np.ndarray:
    """Predict each group by a law that did not see it; return the errors of all points."""
    of_group = (
        np.arange(len(loss_N)) if groups is None else np.unique(groups, return_inverse=True)[1]
    )
    errors = []
    for group in range(of_group.max() + 1):
        out_N = of_group == group
        part = _solve(names, x_NV[~out_N], loss_N[~out_N], asymptote, near=law)
        errors.append(_errors(part, x_NV[out_N], loss_N[out_N]))
    return np.concatenate(errors)


def _block(count: int, groups: Sequence[str] | None, *, is_curve: bool) -> int:
    """Return how many neighbours have errors that are alike."""
    if is_curve:
        return max(1, round(count ** (1 / 3)))
    return 1 if groups is None else max(1, round(count / len(set(groups))))


def _intervals(
    law: PowerLaw,
    x_NV: np.ndarray,
    loss_N: np.ndarray,
    block: int,
    resamples: int,
    random: np.random.Generator,
) -> dict[str, tuple[float, float]]:
    """Bootstrap the errors, in blocks of neighbours; see `fit`."""
    count = len(loss_N)
    error_N, predicted_N = _errors(law, x_NV, loss_N), law(x_NV)
    # A law that was fitted to the points makes smaller errors on them than it truly has.
    free = len(law.values) + len(law.names)
    error_N = (error_N - error_N.mean()) * np.sqrt(count / (count - free))
    drawn: dict[str, list[float]] = {name: [] for name in law.values}
    for _ in range(resamples):
        starts = random.integers(0, count, size=-(-count // block))
        # The first point follows the last: so each is drawn as often as any other.
        at_N = (starts[:, None] + np.arange(block)[None]).ravel()[:count] % count
        again = _solve(
            law.names,
            x_NV,
            predicted_N * np.exp(error_N[at_N]),
            law.asymptote is not None,
            near=law,
        )
        for name, value in again.values.items():
            drawn[name].append(value)
    low, high = INTERVAL
    return {
        name: (float(np.percentile(values, low)), float(np.percentile(values, high)))
        for name, values in drawn.items()
    }

"""Collects runs from folders, and says what their report holds: rows, thresholds, fits, damage."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard_exp.config import ConfigError
from gshard_exp.errors import SettingError
from gshard_exp.score.quality import Baselines
from gshard_exp.sweep import prepare
from gshard_exp.sweep.runs import Run, is_run, read_run
from gshard_exp.sweep.scores import DELTA, METRIC, Scores, is_number

OUTPUT = "report"  # folder below the first that is reported
DEEPEST = 4  # folders below one that is searched for runs
Points = Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Damage:
    """Something that could not be read.

    Attributes:
        where: name of the run, or the folder.
        what: a sentence.
    """

    where: str
    what: str


@dataclasses.dataclass(frozen=True)
class Report:
    """All that is reported.

    Attributes:
        title: of the sweep, or the folders' names.
        runs: in the order of the sweep, or by name.
        waiting: points of a sweep that have no folder yet.
        damage: what could not be read; the rest is reported.
        thresholds: cross entropies (nats per target piece), from high to low.
        remarks: what the reader should know, besides `notes`.
    """

    title: str
    runs: Sequence[Run]
    waiting: Sequence[str]
    damage: Sequence[Damage]
    thresholds: Sequence[float]
    remarks: Sequence[str] = ()

    @property
    def axes(self) -> list[str]:
        """What the sweep varies."""
        return list(dict.fromkeys(axis for run in self.runs for axis in run.axes))

    @property
    def notes(self) -> list[str]:
        """What a reader has to know before comparing."""
        scored = [(run.name, run.scores) for run in self.runs if run.scores]
        kinds = {f"{scores.kind} {scores.signature}".strip(): name for name, scores in scored}
        found = list(self.remarks)
        if len(kinds) > 1:
            shown = "; ".join(f"{name}: {kind}" for kind, name in kinds.items())
            found.append(f"BLEU of these runs was not measured alike ({shown}).")
        codes = {tuple(sorted(run.scores.languages)) for run in self.runs if run.scores}
        if len(codes) > 1:
            found.append("BLEU of these runs is of different languages; averages do not compare.")
        hashes = {(run.record.get("data") or {}).get("hash") for run in self.runs} - {None}
        if len(hashes) > 1:
            found.append("These runs were not trained on the same data (their hashes differ).")
        return found


@dataclasses.dataclass
class _Found:
    """Folders on their way to a report."""

    places: list[tuple[str, Path, Mapping[str, Any]]] = dataclasses.field(default_factory=list)
    waiting: list[str] = dataclasses.field(default_factory=list)
    damage: list[Damage] = dataclasses.field(default_factory=list)
    titles: list[str] = dataclasses.field(default_factory=list)
    remarks: list[str] = dataclasses.field(default_factory=list)


def collect(
    folders: Sequence[str | Path],
    *,
    thresholds: Sequence[float] | None = None,
    baselines: Baselines | None = None,
) -> Report:
    """Read every run in some folders.

    Args:
        folders: each a run, a sweep's folder or a folder of runs.
        thresholds: cross entropies to reach; None: see `default_thresholds`.
        baselines: bilingual scores, for delta BLEU of runs whose `eval` had none.

    Raises:
        SettingError: there is no run in any of them.
    """
    found = _Found()
    for folder in map(Path, folders):
        _search(folder.expanduser(), found)
    if not found.places:
        reasons = "; ".join(damage.what for damage in found.damage)
        waiting = f"; {len(found.waiting)} points of a sweep wait to be run" * bool(found.waiting)
        raise SettingError(
            f"there is nothing to report: {reasons or 'no point has a folder yet'}{waiting}.",
            settings=("dir",),
            hint="A run's folder holds config.gin or train/metrics.jsonl; name one, a sweep's "
            "folder, or a folder of runs.",
        )
    runs = [read_run(folder, name, axes) for name, folder, axes in _named(found.places)]
    damage = [*found.damage, *(Damage(run.name, text) for run in runs for text in run.damage)]
    remarks = found.remarks
    if baselines is not None:
        runs = [_compared(run, baselines, remarks) for run in runs]
    if thresholds is None:
        thresholds = default_thresholds([run.curve for run in runs])
    order = sorted(set(thresholds), reverse=True)
    title = ", ".join(dict.fromkeys(found.titles))
    return Report(title, runs, tuple(found.waiting), tuple(damage), tuple(order), tuple(remarks))


def _search(folder: Path, found: _Found) -> None:
    """Add the runs of a folder that the user named."""
    before = len(found.places) + len(found.waiting)
    found.titles.append(folder.resolve().name)
    if not folder.is_dir():
        found.damage.append(Damage(str(folder), f"{folder} is no folder"))
        return
    _descend(folder, folder, found, DEEPEST)
    if len(found.places) + len(found.waiting) == before:
        found.damage.append(Damage(str(folder), f"{folder} holds no run"))


def _descend(folder: Path, root: Path, found: _Found, depth: int) -> None:
    if (folder / prepare.FILE).is_file() and _add_points(folder, found):
        return
    if is_run(folder):
        name = folder.resolve().name if folder == root else str(folder.relative_to(root))
        found.places.append((name, folder, {}))
        return
    try:
        children = sorted(folder.iterdir()) if depth else []
    except OSError as error:
        found.damage.append(Damage(str(folder), f"{folder} cannot be read: {error.strerror}"))
        return
    for child in children:
        if child.is_dir() and child.name != OUTPUT and not child.name.startswith("."):
            _descend(child, root, found, depth - 1)


def _add_points(folder: Path, found: _Found) -> bool:
    """Add the points of a sweep; False, and a line of damage, if its file cannot be read."""
    try:
        content = prepare.read_folder(folder)
    except ConfigError as error:
        what = error.problem.removeprefix(f"{folder}{os.sep}")
        text = f"{what} The runs below it are reported without their axes."
        found.damage.append(Damage(str(folder), text))
        return False
    found.titles[-1] = content["name"] or folder.resolve().name
    for point in content["points"]:
        name, place = point["name"], folder / point["dir"]
        if place.is_dir() and is_run(place):
            found.places.append((name, place, point["axes"]))
        else:
            found.waiting.append(name)
    named = {point["dir"] for point in content["points"]}
    others = [child.name for child in sorted(folder.iterdir()) if is_run(child)]
    if left := [name for name in others if name not in named]:
        found.remarks.append(
            f"{folder} also holds runs of no point of the sweep as it is now: {', '.join(left)} "
            "(report them by their own folders)"
        )
    return True


def _named(places: Sequence[tuple[str, Path, Mapping]]) -> list[tuple[str, Path, Mapping]]:
    """Give each folder once a name of its own."""
    once: dict[Path, tuple[str, Path, Mapping]] = {}
    for place in places:
        once.setdefault(place[1].resolve(), place)
    kept = list(once.values())
    names = [name for name, _, _ in kept]
    return [
        (name if names.count(name) == 1 else str(folder), folder, axes)
        for name, folder, axes in kept
    ]


def _compared(run: Run, baselines: Baselines, remarks: list[str]) -> Run:
    if run.scores is None:
        return run
    compared = run.scores.against(baselines)
    if isinstance(compared, Scores):
        return dataclasses.replace(run, scores=compared)
    remarks.append(f"{run.name}: {compared}")
    return run


def default_thresholds(curves: Iterable[Points]) -> list[float]:
    """Choose three cross entropies: all runs reach the first, half the second, one the last.

    Rounded up to a tenth; to a hundredth where the runs lie within three tenths.
    """
    best = sorted(min(loss for _, loss in curve) for curve in curves if curve)
    if not best:
        return []
    digits = 1 if best[-1] - best[0] > 0.3 else 2
    chosen = (best[-1], best[len(best) // 2], best[0])
    return list(dict.fromkeys(math.ceil(x * 10**digits) / 10**digits for x in chosen))


def tokens_to_reach(curve: Points, threshold: float) -> float | None:
    """Return the tokens at which a curve first lies at or below a cross entropy (Table 2).

    Between two logged steps on a straight line; None if it has not come there.
    """
    before: tuple[float, float] | None = None
    for tokens, loss in curve:
        if loss <= threshold:
            if before is None:
                return tokens
            share = (before[1] - threshold) / (before[1] - loss)
            return before[0] + share * (tokens - before[0])
        before = (tokens, loss)
    return None


# Of a point: its name in files, its head for people, its value, and how it is written.
Column = tuple[str, str, Callable[[Run], Any], str]


def point_columns(report: Report) -> list[Column]:
    """List the columns of the table of points, axes of the sweep first."""
    of_axes: list[Column] = [(axis, axis, _axis(axis), "") for axis in report.axes]
    columns: list[Column] = [
        ("point", "point", lambda run: run.name, ""),
        *of_axes,
        ("status", "status", lambda run: run.status, ""),
        ("cross_entropy", "loss", lambda run: last(run.curve), ".3f"),
        ("held_out", "held-out loss", held_out_loss, ".3f"),
        (METRIC, "BLEU", lambda run: average(run, METRIC), ".2f"),
        (DELTA, "delta BLEU", lambda run: average(run, DELTA), "+.2f"),
        ("parameters", "params", lambda run: run.model.total, "si"),
        ("active", "active", lambda run: run.model.active, "si"),
        ("tokens", "tokens", lambda run: run.tokens, "si"),
        ("flops", "FLOPs", lambda run: run.flops, "si"),
        ("core_hours", "core-h", lambda run: run.core_hours, "g3"),
        ("step_hours", "step-h", lambda run: run.step_hours, "g3"),
        ("left_behind", "left behind", _left_behind, "%"),
        ("seed", "seed", _seed, ""),
    ]
    # An axis may be called as a column is (`seed`); the column is what took effect.
    known = [key for key, *_ in columns]
    return [column for i, column in enumerate(columns) if column[0] not in known[i + 1 :]]


def _axis(name: str) -> Callable[[Run], Any]:
    return lambda run: run.axes.get(name)


def average(run: Run, metric: str) -> float | None:
    """Return a run's mean over languages, None where there is none."""
    return run.scores.average(metric) if run.scores else None


def held_out_loss(run: Run) -> float | None:
    """Return the newest loss of held-out text after some training."""
    return last([point for point in run.held_out_curve if point[0] > 0])


def _seed(run: Run) -> Any:
    seed = run.record.get("seed")
    return seed if seed is not None else run.model.settings.get("seed")


def last(curve: Points) -> float | None:
    """Return the last value of a curve, None if it is empty."""
    return curve[-1][1] if curve else None


def _left_behind(run: Run) -> float | None:
    key, newest = "fraction_tokens_left_behind", run.lines[-1] if run.lines else {}
    return newest[key] if is_number(newest, key) else None


def written(value: Any, form: str) -> str:
    """Write a value for a person; a dash for None.

    Args:
        value: a number or a text.
        form: "si" (12.3 M), "g3" (three digits), "%", a format of Python's, or "" (as it is).
    """
    if value is None:
        return "-"
    if isinstance(value, str) or not form:
        return str(value)
    if form == "si":
        return si(value)
    if form == "g3":
        return f"{value:.3g}"
    if form == "%":
        return f"{value:.2%}"
    return format(value, form)


def si(value: float, digits: int = 3) -> str:
    """Write 12345678 as `12.3M`; a billion is `B`."""
    for power, letter in enumerate("KMGTPEZYRQ"[::-1]):
        scale = 1000.0 ** (10 - power)
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.{digits}g}{'B' if letter == 'G' else letter}"
    return f"{value:.{digits}g}"

"""A sweep: experiments that differ in a few axes, and what each of them is called.

A gin file (or a fiddle builder) assembles a `Sweep`; `points_of` lists its points without looking
at the experiment that they change. Names are made of all axes, so that a new value of an axis
renames no point that is there already.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gshard_exp.errors import SettingError, require_one_of

# Other things in the folder of a sweep; names of points are compared with them in lower case.
RESERVED = ("report", "sweep.json")
PRODUCT, ZIP, LIST = "product", "zip", "list"
Labels = dict[str, Any]  # name of an axis -> value as it is shown


@dataclasses.dataclass(frozen=True)
class Axis:
    """What varies.

    Attributes:
        name: as it is shown: "layers".
        sets: names of macros or parameters (with fiddle: paths) that get the value:
            "NUM_EXPERTS", or ["NUM_ENCODER_LAYERS", "NUM_DECODER_LAYERS"].
        values: either a list: each value as gin or Python writes it. Or a dict of labels: with
            `sets` to the value, without it to a list of settings ("NAME=VALUE", as `--gin.` takes
            them; with fiddle "PATH=VALUE", as `--fdl_set` does) and gin files ("a.gin", later than
            those of the base). May be empty if the points are listed.
        short: what stands before a label in the names of points ("l" in "l12"). None: the initials
            of `name`, and nothing before a label that starts with a letter.
    """

    name: str
    sets: str | Sequence[str] = ()
    values: Sequence[Any] | Mapping[Any, Any] = ()
    short: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise SettingError("name is empty: an axis is called something.", ("name",))
        if isinstance(self.values, str):
            raise SettingError(
                f"values={self.values!r} is one string: an axis has a list of values.", ("values",)
            )
        if self.names:
            return
        if not isinstance(self.values, Mapping):
            raise SettingError(
                f"the axis {self.name!r} does not say what its values are values of.",
                ("sets", "values"),
                'Set `sets` ("NUM_EXPERTS"), or make `values` a dict from labels to settings.',
            )
        for label, settings in self.values.items():
            texts = isinstance(settings, (list, tuple)) and all(
                isinstance(s, str) for s in settings
            )
            if not texts:
                raise SettingError(
                    f"the value {label!r} of the axis {self.name!r} is {settings!r}; without "
                    "`sets` it is a list of settings and gin files.",
                    ("values",),
                    f'{{{label!r}: ["NAME=VALUE", "a/file.gin"]}}',
                )

    @property
    def names(self) -> tuple[str, ...]:
        """What `sets` lists."""
        return (self.sets,) if isinstance(self.sets, str) else tuple(self.sets)

    @property
    def labels(self) -> list[Any]:
        """The values as they are shown, in their order."""
        return list(self.values)

    def settings(self, label: Any) -> tuple[str, ...]:
        """Return the settings and gin files of a value.

        Raises:
            SettingError: the axis has no such value.
        """
        if isinstance(self.values, Mapping):
            if not _among(label, self.labels):
                raise SettingError(
                    f"the axis {self.name!r} has no value {label!r}: it has "
                    f"{', '.join(map(repr, self.labels)) or 'none'}."
                )
            value = self.values[label]
            if not self.names:
                return tuple(value)
        else:
            value = label
        return tuple(f"{name}={value!r}" for name in self.names)

    def part(self, label: Any) -> str:
        """Return what a value adds to the names of points."""
        text = _text(label)
        short = self.short
        if short is None:
            words = isinstance(label, str) and text[:1].isalpha()
            short = (
                "" if words else "".join(word[0] for word in re.split(r"[\W_]+", self.name) if word)
            )
        return _text(f"{short}{text}")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Experiments that differ in a few axes.

    Attributes:
        name: of the sweep.
        folder: of all its runs; each point has a folder in it.
        base: gin files of the experiment that the points change; later ones win.
        fiddle: instead of `base`: what `--fdl_config` takes.
        axes: what varies; the names of points follow their order.
        combine: "product" of all values, "zip" (first with first, ...), or "list": no more than
            `points`.
        points: further points, each a dict from axes to values. An axis that a point leaves out
            stays as the base has it.
        exclude: combinations to leave out, each a dict from axes to a value or a list of values.
        settings: of all points, as those of a value of an axis; an axis wins over them.
    """

    name: str
    folder: str
    base: Sequence[str] = ()
    fiddle: str = ""
    axes: Sequence[Axis] = ()
    combine: str = PRODUCT
    points: Sequence[Mapping[str, Any]] = ()
    exclude: Sequence[Mapping[str, Any]] = ()
    settings: Sequence[str] = ()

    def __post_init__(self) -> None:
        require_one_of(self, (PRODUCT, ZIP, LIST), "combine")
        if bool(self.base) == bool(self.fiddle):
            raise SettingError(
                f"base={list(self.base)} and fiddle={self.fiddle!r}: a sweep changes one of them.",
                ("base", "fiddle"),
                "Set `base` to a list of gin files, or `fiddle` to a builder.",
            )
        if isinstance(self.base, str):
            raise SettingError(f"base={self.base!r} has to be a list of gin files.", ("base",))
        names = [axis.name for axis in self.axes]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise SettingError(f"two axes are called {twice[0]!r}.", ("axes",))
        self._check_points()

    def _check_points(self) -> None:
        by_name = {axis.name: axis for axis in self.axes}
        for field in ("points", "exclude"):
            for number, entry in enumerate(getattr(self, field)):
                for name in entry:
                    if name not in by_name:
                        raise SettingError(
                            f"{field}[{number}] names the axis {name!r}; there are "
                            f"{', '.join(by_name) or 'none'}.",
                            (f"{field}[{number}]", "axes"),
                        )
        for number, entry in enumerate(self.points):
            for name, label in entry.items():
                try:
                    by_name[name].settings(label)
                except SettingError as error:
                    raise SettingError(
                        f"points[{number}]: {error.problem}", (f"points[{number}]",)
                    ) from None


@dataclasses.dataclass(frozen=True)
class Point:
    """One experiment of a sweep.

    Attributes:
        name: of the point and of its folder.
        axes: its values as they are shown.
        settings: what changes the base, by the place in the sweep that says so (a path from the
            sweep: `settings`, `axes[0].values`), in the order in which they take effect.
    """

    name: str
    axes: Mapping[str, Any]
    settings: Mapping[str, tuple[str, ...]]

    @property
    def files(self) -> list[str]:
        """The gin files among the settings."""
        return [text for text in self._texts() if is_file(text)]

    @property
    def bindings(self) -> list[str]:
        """The settings that set a value."""
        return [text for text in self._texts() if not is_file(text)]

    def _texts(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self.settings.values())


def is_file(setting: str) -> bool:
    """Tell a gin file (with fiddle: a builder) from a setting."""
    return "=" not in setting or "(" in setting.partition("=")[0]


def points_of(sweep: Sweep) -> list[Point]:
    """List the points of a sweep.

    Raises:
        SettingError: there is none, two have one name or one has a name that is taken, or an
            exclusion excludes nothing.
    """
    rows = [*_combined(sweep), *map(dict, sweep.points)]
    kept = [row for row in rows if not any(_matches(row, entry) for entry in sweep.exclude)]
    for number, entry in enumerate(sweep.exclude):
        if not any(_matches(row, entry) for row in rows):
            raise SettingError(
                f"exclude[{number}]={dict(entry)} excludes nothing: no point has these values.",
                (f"exclude[{number}]",),
                "Remove it, or write values as the axes do.",
            )
    if not kept:
        raise SettingError(
            f"the sweep {sweep.name!r} has no point: {_emptiness(sweep, rows)}.",
            ("axes", "points", "exclude"),
            "Give every axis at least one value.",
        )
    points = [_point(sweep, row) for row in kept]
    _check_names(points)
    return points


def _combined(sweep: Sweep) -> list[Labels]:
    if sweep.combine == LIST or not sweep.axes:
        return []
    names = [axis.name for axis in sweep.axes]
    columns = [axis.labels for axis in sweep.axes]
    if sweep.combine == PRODUCT:
        return [dict(zip(names, row, strict=True)) for row in itertools.product(*columns)]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(f"{n} has {len(c)}" for n, c in zip(names, columns, strict=True))
        raise SettingError(
            f"axes that are zipped have equally many values: {counts}.", ("combine", "axes")
        )
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _emptiness(sweep: Sweep, rows: Sequence[Labels]) -> str:
    if rows:
        return f"its exclusions leave out all {len(rows)}"
    if sweep.combine == LIST:
        return "combine='list' and points is empty"
    empty = [axis.name for axis in sweep.axes if not axis.labels]
    return f"the axis {empty[0]!r} has no values" if empty else "it has no axes"


def _matches(row: Labels, entry: Mapping[str, Any]) -> bool:
    """Whether a point has the values of an exclusion, each of which may be one of a list."""

    def fits(value: Any, wanted: Any) -> bool:
        many = wanted if isinstance(wanted, (list, tuple)) else ()
        return _among(value, [wanted, *many])

    return all(name in row and fits(row[name], wanted) for name, wanted in entry.items())


def _among(value: Any, labels: Sequence[Any]) -> bool:
    """Whether a value is one of some; True is not 1."""
    return any(
        value == other and isinstance(value, bool) is isinstance(other, bool) for other in labels
    )


def _point(sweep: Sweep, row: Labels) -> Point:
    settings = {"settings": tuple(sweep.settings)} if sweep.settings else {}
    parts = []
    for index, axis in enumerate(sweep.axes):
        if axis.name in row:
            settings[f"axes[{index}].values"] = axis.settings(row[axis.name])
            parts.append(axis.part(row[axis.name]))
    shown = {axis.name: row[axis.name] for axis in sweep.axes if axis.name in row}
    return Point("-".join(part for part in parts if part) or "base", shown, settings)


def _check_names(points: Sequence[Point]) -> None:
    seen: dict[str, Point] = {}
    for point in points:
        if point.name.lower() in RESERVED:
            raise SettingError(
                f"a point is called {point.name!r} ({_shown(point)}), as something else in the "
                "folder of a sweep is.",
                ("axes", "points"),
                "Set `short` of an axis, or give the value another label ({label: value}).",
            )
        # Folders whose names differ in case alone are one folder on some machines.
        other = seen.setdefault(point.name.lower(), point)
        if other is not point:
            raise SettingError(
                f"two points are called {point.name!r}: {_shown(other)} and {_shown(point)}.",
                ("axes", "points"),
                "Values have to differ in what stands in names: set `short` of an axis, or give "
                "values labels ({label: value}).",
            )


def _shown(point: Point) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in point.axes.items()) or "the base"


def _text(label: Any) -> str:
    """Write a value so that it can stand in the name of a folder."""
    if isinstance(label, (list, tuple)):
        return "+".join(map(_text, label))
    if isinstance(label, (bool, type(None))):
        return str(label).lower()
    return re.sub(r"[^\w.+-]+", "_", str(label)).strip("_.")

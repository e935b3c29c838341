"""From the file of a sweep to experiments that are known to be valid, before anything runs."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gshard_exp.config import Assembled, ConfigError, assemble
from gshard_exp.config.reading import FIDDLE
from gshard_exp.sweep.grid import Point, Sweep, is_file, points_of
from gshard_exp.train.experiment import Experiment, check_without_devices

FILE = "sweep.json"
SCHEMA = 1
SET = "--set="  # the flag that adds to `Sweep.settings`
_LISTED = 3  # mistakes of points that are told in full


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A point of a sweep that was assembled and checked.

    Attributes:
        point: what it is called and what it sets.
        assembled: its experiment.
        folder: its MODEL_DIR.
        words: of the command line that trains it, after `gshard-exp`.
    """

    point: Point
    assembled: Assembled[Experiment]
    folder: Path
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the point."""
        return self.point.name


@dataclasses.dataclass(frozen=True)
class SweepFile:
    """A sweep as a file and flags describe it.

    Attributes:
        sweep: with the settings of `--set`.
        assembled: of the file alone, which knows who set what.
        points: of the grid.
        search_paths: folders in which gin files are looked for.
        flags: settings of `--set`.
    """

    sweep: Sweep
    assembled: Assembled[Sweep]
    points: Sequence[Point]
    search_paths: Sequence[str] = ()
    flags: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        """Of all runs."""
        return Path(self.sweep.folder).expanduser()


def read_sweep(
    name: str,
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    *,
    assignments: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> SweepFile:
    """Assemble a sweep and list its points; no experiment is assembled yet.

    Args:
        name: a gin file, several joined by commas, or `fdl:` and a builder that returns an
            `fdl.Config` of `Sweep`.
        bindings: `NAME=VALUE`, of the sweep's own file.
        search_paths: folders in which gin files are looked for.
        assignments: `PATH=VALUE`, of the builder.
        flags: settings of every point, which win over all but change no axis.

    Raises:
        ConfigError: any mistake in the sweep.
    """
    if name.startswith(FIDDLE):
        from gshard_exp.config.from_fiddle import assemble_fiddle

        assembled = assemble_fiddle(Sweep, name.removeprefix(FIDDLE), assignments)
    else:
        files = [file for file in name.split(",") if file]
        assembled = assemble(Sweep, files, bindings, search_paths)
    sweep = dataclasses.replace(assembled.tree, settings=(*assembled.tree.settings, *flags))
    with assembled.explaining():
        points = points_of(sweep)
    return SweepFile(sweep, assembled, points, search_paths, flags)


def prepare(file: SweepFile, points: Sequence[Point] | None = None) -> list[Prepared]:
    """Assemble and validate points (default: all), without a device.

    Raises:
        ConfigError: with every point that is wrong, and who set what is.
    """
    prepared, mistakes = [], []
    for point in file.points if points is None else points:
        try:
            prepared.append(_prepare(file, point))
        except ConfigError as error:
            mistakes.append((point, error))
    if mistakes:
        raise _all_mistakes(mistakes, len(prepared))
    return prepared


def _prepare(file: SweepFile, point: Point) -> Prepared:
    _check_settings(file, point)
    folder = file.folder / point.name
    try:
        assembled = _assemble(file, point, folder)
        with assembled.explaining():
            check_without_devices(assembled.tree)
    except ConfigError as error:
        raise _in_sweep(error, file, point) from error
    return Prepared(point, assembled, folder, _words(file, point, folder))


def _assemble(file: SweepFile, point: Point, folder: Path) -> Assembled[Experiment]:
    if file.sweep.fiddle:
        from gshard_exp.config.from_fiddle import assemble_fiddle

        assignments = [*point.bindings, f"model_dir={folder}"]
        return assemble_fiddle(Experiment, _builder(file, point), assignments)
    files = [*file.sweep.base, *point.files]
    bindings = [*point.bindings, f"MODEL_DIR={folder}"]
    return assemble(Experiment, files, bindings, file.search_paths)


def _builder(file: SweepFile, point: Point) -> str:
    """Return the builder of a point: the last that a value names, else that of the sweep."""
    return [file.sweep.fiddle, *point.files][-1]


def _words(file: SweepFile, point: Point, folder: Path) -> tuple[str, ...]:
    if file.sweep.fiddle:
        sets = [f"--fdl_set={text}" for text in point.bindings]
        return (
            "train",
            f"--fdl_config={_builder(file, point)}",
            *sets,
            f"--fdl_set=model_dir={folder}",
        )
    words = [f"--gin_file={name}" for name in (*file.sweep.base, *point.files)]
    words += [f"--gin.{text}" for text in point.bindings]
    if file.search_paths:
        words.append(f"--gin_search_paths={','.join(file.search_paths)}")
    return ("train", *words, f"--gin.MODEL_DIR={folder}")


def _place(file: SweepFile, path: str, text: str) -> str:
    """Say where in the sweep a setting or file of a point stands."""
    if path == "settings" and text in file.flags:
        return f"command line: {SET}{text}"
    return f"{file.assembled.where(path)} ({path} of the sweep: {text})"


def _check_settings(file: SweepFile, point: Point) -> None:
    """Refuse what is set twice, and the folder, which the sweep itself sets."""
    folder = "model_dir" if file.sweep.fiddle else "MODEL_DIR"
    fixed: dict[str, tuple[str, str]] = {}  # what a flag or an axis sets has to take effect
    for path, texts in point.settings.items():
        for text in texts:
            name = text.partition("=")[0].strip()
            if is_file(text):
                continue
            if name == folder:
                raise ConfigError(
                    f"{name} is set for the point {point.name}.",
                    rule="The folder of a point is its name, in the folder of the sweep.",
                    at=[_place(file, path, text)],
                )
            of_axis = path != "settings"
            if of_axis and name in fixed:
                before = fixed[name]
                raise ConfigError(
                    f"{name} is set twice for the point {point.name}: {before[1]} and {text}.",
                    rule="Each of them would have to take effect.",
                    at=[_place(file, *before), _place(file, path, text)],
                )
            if of_axis or text in file.flags:
                fixed[name] = path, text


def _in_sweep(error: ConfigError, file: SweepFile, point: Point) -> ConfigError:
    """Say where in the sweep a setting stands, instead of the flag that it becomes."""
    options = ("gin.", "gin_file=", "fdl_set=", "fdl_config=")
    flags = {
        f"command line: --{option}{text}": _place(file, path, text)
        for path, texts in point.settings.items()
        for text in texts
        for option in options
    }
    at = []
    for place in error.at:
        # What was read through a macro has more behind it, in brackets.
        found = [flag for flag in flags if place == flag or place.startswith(f"{flag} (")]
        longest = max(found, key=len, default=place)
        at.append(flags.get(longest, longest) + place[len(longest) :])
    return ConfigError(
        f"The point {point.name}: {error.problem}", rule=error.rule, at=at, hint=error.hint
    )


def _all_mistakes(mistakes: Sequence[tuple[Point, ConfigError]], valid: int) -> ConfigError:
    """Tell the first mistake, and which other points have one."""
    first = mistakes[0][1]
    if len(mistakes) == 1:
        return first
    names = [other.name for other, _ in mistakes[1:]]
    more = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
    rule = f"{first.rule} {len(mistakes)} of {valid + len(mistakes)} points are wrong; also {more}."
    return ConfigError(first.problem, rule=rule.strip(), at=first.at, hint=first.hint)


def write_sweep(file: SweepFile) -> Path:
    """Write sweep.json, which says of a folder which runs of which sweep lie in it.

    Raises:
        ConfigError: the folder is that of another sweep.
    """
    path = file.folder / FILE
    other = read_folder(file.folder) if path.exists() else None
    if other is not None and other["name"] != file.sweep.name:
        raise file.assembled.error(
            f"{file.folder} is the folder of the sweep {other['name']!r}, and this is "
            f"{file.sweep.name!r}.",
            paths=("folder", "name"),
            rule="Each sweep has a folder of its own.",
            hint="another folder, or the name of the sweep that lies there",
        )
    content = {
        "schema": SCHEMA,
        "name": file.sweep.name,
        "base": list(file.sweep.base),
        "fiddle": file.sweep.fiddle,
        "points": [
            {
                "name": point.name,
                "dir": point.name,
                "axes": dict(point.axes),
                "files": point.files,
                "bindings": point.bindings,
            }
            for point in file.points
        ],
    }
    file.folder.mkdir(parents=True, exist_ok=True)
    # Of this process alone: two may write at once, and the same.
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def read_folder(folder: Path) -> dict[str, Any]:
    """Read the sweep.json of a folder: `name`, and `points` with `name`, `dir` and `axes` each.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = folder / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"The folder '{folder}' holds no {FILE}.",
            rule="gshard-exp sweep run writes one into the folder of a sweep.",
            at=[str(folder)],
        ) from None
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(path, f"it holds a {type(content).__name__}, not an object")
    if content.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path} has schema {content.get('schema')!r}; this version reads schema {SCHEMA}.",
            at=[str(path)],
        )
    if not isinstance(content.get("name"), str):
        raise _damaged(path, f"'name' is {content.get('name')!r}")
    if not isinstance(content.get("points"), list):
        raise _damaged(path, f"'points' is {content.get('points')!r:.60}")
    for number, point in enumerate(content["points"]):
        for key, kind in {"name": str, "dir": str, "axes": dict}.items():
            if not isinstance(point, dict) or not isinstance(point.get(key), kind):
                raise _damaged(path, f"points[{number}] is {point!r:.60}, without '{key}'")
    return content


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged: {what}.",
        at=[str(path)],
        hint="remove it; gshard-exp sweep run writes it anew, and runs stay as they are",
    )

"""Finds gin files: in the current folder, in the user's folders, then in ours."""

from collections.abc import Sequence
from pathlib import Path

from gshard_exp.config.errors import ConfigError, nearest, one_of

SHIPPED_FOLDERS = ("gin", "experiments")


def shipped_root() -> Path:
    """Return the folder that contains our `gin/` and `experiments/`.

    An installed wheel carries them inside the package. The order of the two tests matters: next
    to an installed package lies `site-packages/gin`, which is gin-config itself.
    """
    package = Path(__file__).resolve().parent.parent
    return package if (package / "gin").is_dir() else package.parent


def search_roots(search_paths: Sequence[str] = ()) -> list[Path]:
    """List the folders that a relative path is looked up in, first wins."""
    return [Path(), *(Path(path) for path in search_paths), shipped_root()]


def find_gin_files(roots: Sequence[Path | str] | None = None) -> list[Path]:
    """List every gin file in `gin/` and `experiments/` below the roots (default: ours), sorted."""
    found: set[Path] = set()
    for root in [shipped_root()] if roots is None else roots:
        for folder in SHIPPED_FOLDERS:
            found.update((Path(root) / folder).rglob("*.gin"))
    return sorted(found)


def find_gin_file(name: str, roots: Sequence[Path], asked_at: str) -> tuple[Path, str]:
    """Find a gin file by absolute path, or by path relative to one of the roots.

    Args:
        name: the path as written in a flag or an `include`.
        roots: as of `search_roots`.
        asked_at: who asks, for the error: `gin/runs/train.gin:3` or `command line: ...`.

    Returns:
        The path to open, and the short name to show in messages.

    Raises:
        ConfigError: no such file; names the nearest ones that exist.
    """
    for root in roots:
        path = root / name  # an absolute name replaces the root
        if path.is_file():
            return path, name
    folders = ", ".join(str(root.resolve()) for root in roots)
    known = _names_below(name, roots)
    raise ConfigError(
        f"There is no gin file '{name}'.",
        rule=f"A relative path is looked up in: {folders}.",
        at=[asked_at],
        hint=one_of(_nearest_files(name, known)),
    )


def _nearest_files(name: str, known: set[str]) -> list[str]:
    """List the nearest file names; the suffix that all have says nothing."""
    by_stem = {file.removesuffix(".gin"): file for file in known}
    return [by_stem[stem] for stem in nearest(name.removesuffix(".gin"), by_stem)]


def _names_below(name: str, roots: Sequence[Path]) -> set[str]:
    """List names that would have been found: shipped ones, and those next to the missing file."""
    known: set[str] = set()
    for root in roots:
        known.update(str(path.relative_to(root)) for path in find_gin_files([root]))
        folder = (root / name).parent
        if folder.is_dir():
            known.update(str(Path(name).parent / path.name) for path in folder.glob("*.gin"))
    return known

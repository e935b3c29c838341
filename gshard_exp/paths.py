"""Write the place of a leaf in a tree. Imports nothing of ours."""

from collections.abc import Sequence
from typing import Any


def path_keys(path: Sequence[Any]) -> tuple[str, ...]:
    """Return the keys, field names and indices of a JAX tree path, as text."""
    return tuple(
        str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", ""))))
        for entry in path
    )


def parameter_path(path: Sequence[Any]) -> str:
    """Write a tree path as `encoder/pattern_1/ffn/wi`."""
    return "/".join(path_keys(path))

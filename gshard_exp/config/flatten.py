"""Lists the leaves of a tree of dataclasses by path."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from gshard_exp.config import signatures


class Bound(functools.partial):
    """A function with arguments that gin bound. Equal if the function and arguments are equal.

    `functools.partial` compares by identity, which would make two equal configs differ, and make
    JAX compile again for a module that holds one.
    """

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, functools.partial)
            and self.func == other.func
            and self.args == other.args
            and self.keywords == other.keywords
        )

    def __hash__(self) -> int:
        return hash((self.func, self.args, tuple(sorted(self.keywords))))


def flatten(tree: Any) -> dict[str, Any]:
    """Map each leaf's path (`model.layers[0].width`, `lengths['inputs']`) to its value.

    Fields of dataclasses, arguments of bound functions and items of lists, tuples and dicts are
    descended into; an empty one is a leaf. Linen's own `parent` and `name` are not settings, and
    are left out unless set.
    """
    return dict(_leaves(tree, ""))


def settings(tree: Any) -> dict[str, Any]:
    """Map paths to values as `flatten` does, and the path of each dataclass to its class.

    Two classes with equal fields, such as two gating functions, differ in nothing else. The class
    stands before the fields; that of the tree itself is left out.
    """
    return {path: value for path, value in _nodes(tree, "") if path}


def _nodes(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = list(_children(value, path))
    if signatures.is_dataclass_type(type(value)):
        yield path, type(value)
    elif isinstance(value, Bound):
        yield path, value.func
    elif not children:
        yield path, value
    for child_path, child in children:
        yield from _nodes(child, child_path)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = list(_children(value, path))
    if isinstance(value, Bound):
        yield path, value.func
    elif not children:
        yield path, value
    for child_path, child in children:
        yield from _leaves(child, child_path)


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    dot = f"{path}." if path else ""
    if signatures.is_dataclass_type(type(value)):
        for field in dataclasses.fields(value):
            child = getattr(value, field.name, None)
            unset = child is None or not isinstance(child, str)
            if field.init and not (unset and signatures.is_linens_own(type(value), field.name)):
                yield f"{dot}{field.name}", child
    elif isinstance(value, Bound):
        for name, child in value.keywords.items():
            yield f"{dot}{name}", child
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield f"{path}[{key!r}]", child
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield f"{path}[{index}]", child

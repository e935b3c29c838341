"""Remembers for each value of the tree which statement wrote it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from gshard_exp.config.values import Site


@dataclasses.dataclass(frozen=True)
class Where:
    """The place that a value comes from.

    Args:
        site: the statement that holds the value; None for a default.
        macros: the macros that it came through, the one read by the binding first.
        read_at: the binding that reads the first macro; None without macros.
    """

    site: Site | None = None
    macros: tuple[str, ...] = ()
    read_at: Site | None = None

    def __str__(self) -> str:
        return self.of("")

    def of(self, path: str) -> str:
        """Name the place, and in brackets what was set there and through which macros."""
        chain = ", ".join(f"%{name}" for name in self.macros)
        details = [path] if path else []
        details += [f"{chain} read at {self.read_at}"] if chain else []
        place = str(self.site) if self.site else "default"
        return f"{place} ({', '.join(details)})" if details else place


DEFAULT = Where()


@dataclasses.dataclass
class Node:
    """A value and where it comes from.

    Args:
        value: what was built.
        where: the statement that wrote it.
        macros: the macros crossed at this very expression, outermost first (`where.macros` also
            has those of the containers around it).
        items: the nodes inside, if the value is a list, tuple or dict.
    """

    value: Any
    where: Where
    macros: tuple[str, ...] = ()
    items: dict[Any, Node] | None = None


@dataclasses.dataclass
class CallNode(Node):
    """A value that was made by a reference.

    Args:
        target: the class or function.
        scope: the gin scope of the call.
        arguments: what gin bound, by parameter; parameters left at their default are not in it.
        calls: True for `@f()`; False for `@f`, which is passed on with its arguments bound.
    """

    target: Any = None
    scope: tuple[str, ...] = ()
    arguments: dict[str, Node] = dataclasses.field(default_factory=dict)
    calls: bool = True


def steps_of(path: str) -> list[Any]:
    """Split `model.rules[0]['inputs']` into `['model', 'rules', 0, 'inputs']`."""
    steps: list[Any] = []
    for index, name in re.findall(r"\[([^\]]*)\]|([^.\[\]]+)", path):
        if name:
            steps.append(name)
        elif re.fullmatch(r"-?\d+", index):
            steps.append(int(index))
        else:
            steps.append(index.strip("'\""))
    return steps


def find(node: Node, path: str | Sequence[Any]) -> Where:
    """Say where the value at a path was set.

    A path that leads into what one statement built as a whole gives that statement; a path to a
    parameter that nothing binds gives the default.
    """
    for step in steps_of(path) if isinstance(path, str) else path:
        if isinstance(node, CallNode):
            if step in node.arguments:
                node = node.arguments[step]
            elif isinstance(node.target, type):
                return DEFAULT
            else:  # inside what a function returned
                return node.where
        elif node.items is not None and step in node.items:
            node = node.items[step]
        else:
            return node.where
    return node.where

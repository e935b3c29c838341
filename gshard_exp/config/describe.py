"""Describes a value that is built already as if a gin file had built it."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Hashable, Mapping
from typing import Any

from gshard_exp.config import signatures
from gshard_exp.config.provenance import DEFAULT, CallNode, Node, Where

_LITERALS = (int, float, str, bytes, bool, type(None))
Sources = dict[Any, tuple[str, str]]  # class or function -> its module, and its name there


class NoSyntax(Exception):
    """A value that gin has no syntax for."""


def describe(
    value: Any, sources: Sources, where: Where = DEFAULT, *, private: bool = False
) -> Node:
    """Return the node of a literal, container, dataclass, bound function, class or function.

    Args:
        value: what is described.
        sources: where classes and functions are imported from; those found are added.
        where: who set the value.
        private: take what only a private module has, which the next version of its library may
            move: all right for what a user chose, not for a default.

    Raises:
        NoSyntax: gin cannot write the value.
    """
    describe_inner = functools.partial(describe, sources=sources, where=where, private=private)

    def call(target: Any, arguments: Mapping[str, Any], calls: bool) -> CallNode:
        add_source(target, sources, private=private)
        nodes = {name: describe_inner(argument) for name, argument in arguments.items()}
        return CallNode(value, where, target=target, arguments=nodes, calls=calls)

    cls = type(value)
    if cls in _LITERALS:
        if cls is float and not math.isfinite(value):
            raise NoSyntax
        return Node(value, where)
    if cls in (list, tuple):
        return Node(value, where, items={i: describe_inner(v) for i, v in enumerate(value)})
    if cls is dict:
        return Node(value, where, items={key: describe_inner(v) for key, v in value.items()})
    if signatures.is_dataclass_type(cls):
        fields = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.init and not signatures.is_linens_own(cls, field.name)
        }
        return call(cls, fields, calls=True)
    if isinstance(value, functools.partial) and not value.args:
        return call(value.func, value.keywords, calls=False)
    return call(value, {}, calls=False)


def add_source(target: Any, sources: Sources, *, private: bool) -> None:
    """Note the module and name of a class or function.

    Raises:
        NoSyntax: it cannot be imported by a name, or only from a private module.
    """
    if not isinstance(target, Hashable):
        raise NoSyntax
    if target in sources:
        return
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise NoSyntax
    found: Any = sys.modules.get(module)
    for attribute in name.split("."):
        found = getattr(found, attribute, None)
    hidden = any(part.startswith("_") for part in f"{module}.{name}".split("."))
    if found is not target or (hidden and not private) or module == "builtins":
        raise NoSyntax
    sources[target] = (module, name)

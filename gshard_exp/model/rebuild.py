"""Copy a tree of modules that stand alone, with changes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn


def rebuilt(
    node: Any, changes: Callable[[nn.Module], Mapping[str, Any]] = lambda module: {}
) -> Any:
    """Copy a module and those within it.

    flax would tie the parameters of a module object that is used twice; copies are others.

    Args:
        node: a module, a tuple of them, or any other value, which is returned as it is.
        changes: fields of each module to replace.
    """
    if isinstance(node, tuple):
        return tuple(rebuilt(item, changes) for item in node)
    if not isinstance(node, nn.Module):
        return node
    fields = {
        field.name: rebuilt(getattr(node, field.name), changes)
        for field in dataclasses.fields(node)
        if field.name not in ("parent", "name")
    }
    return type(node)(**{**fields, **changes(node)})

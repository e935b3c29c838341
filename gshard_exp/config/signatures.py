"""What a class or function can be given: parameters, defaults and types."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Mapping
from typing import Any

_LINEN_OWN = ("parent", "name")


def is_dataclass_type(target: Any) -> bool:
    """Whether the target is a dataclass (linen modules are)."""
    return isinstance(target, type) and dataclasses.is_dataclass(target)


def is_linen_module(cls: type) -> bool:
    """Whether a class is a linen module, found out without importing flax."""
    return any(c.__module__ == "flax.linen.module" and c.__name__ == "Module" for c in cls.__mro__)


def is_linens_own(cls: Any, field: str) -> bool:
    """Whether a field was added by linen (`parent`, `name`) and is no setting of the user's."""
    return field in _LINEN_OWN and isinstance(cls, type) and is_linen_module(cls)


@functools.cache
def parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    """List the parameters that gin may bind, in order; without `*args` and `**kwargs`."""
    return {
        name: parameter
        for name, parameter in _signature(target).items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def takes_any_keyword(target: Any) -> bool:
    """Whether the target has `**kwargs`."""
    return any(p.kind == p.VAR_KEYWORD for p in _signature(target).values())


@functools.cache
def types(target: Any) -> Mapping[str, Any]:
    """Return the annotation of each parameter; one that cannot be evaluated is left out.

    Annotations are strings under `from __future__ import annotations`, and may name what is
    imported only for the type checker. Such a one is not checked.
    """
    owners: list[Any]
    if is_dataclass_type(target):
        owners = list(reversed(target.__mro__))
    elif isinstance(target, type):
        owners = [vars(target).get("__init__", target)]
    else:
        owners = [inspect.unwrap(target)]
    found: dict[str, Any] = {}
    for owner in owners:
        scope = dict(vars(sys.modules.get(getattr(owner, "__module__", ""), sys)))
        for name, hint in _annotations(owner).items():
            found.pop(name, None)
            # A failure is contained: whatever one annotation does, the others are evaluated.
            with contextlib.suppress(Exception):
                holder = type("Holder", (), {"__annotations__": {name: hint}})
                found[name] = typing.get_type_hints(holder, scope)[name]
    return found


def default_of(target: Any, name: str) -> Any:
    """Return the default of a parameter; `inspect.Parameter.empty` if it has none."""
    if is_dataclass_type(target):
        for field in dataclasses.fields(target):
            if field.name == name and field.default_factory is not dataclasses.MISSING:
                return field.default_factory()
    found = parameters(target).get(name)  # none if it goes into `**kwargs`
    return found.default if found else inspect.Parameter.empty


def _signature(target: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}


def _annotations(owner: Any) -> Mapping[str, Any]:
    try:
        return inspect.get_annotations(owner)
    except TypeError:  # neither class, function nor module
        return {}

"""Checks a value against a type annotation, without importing what the annotation names."""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from typing import Any, Literal, Union


def matches(value: Any, hint: Any) -> bool:
    """Whether a value fits an annotation. An annotation that cannot be judged fits everything.

    A float takes an int; an int takes no bool; a sequence takes no string.
    """
    origin = typing.get_origin(hint)
    if hint is Any or isinstance(hint, (str, typing.TypeVar)):
        return True
    if hint is None or hint is type(None):
        return value is None
    if hasattr(hint, "__supertype__"):  # NewType
        return matches(value, hint.__supertype__)
    if origin is typing.Annotated:
        return matches(value, typing.get_args(hint)[0])
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in typing.get_args(hint))
    if origin in (Union, types.UnionType):
        return any(matches(value, arg) for arg in typing.get_args(hint))
    if origin is None:
        return _matches_class(value, hint)
    return _matches_generic(value, origin, typing.get_args(hint))


def _matches_class(value: Any, hint: Any) -> bool:
    if not isinstance(hint, type):
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (collections.abc.Sequence, collections.abc.Iterable):
        return isinstance(value, hint) and not isinstance(value, str)
    if getattr(hint, "_is_protocol", False) or hint.__module__.split(".")[0] == "jaxtyping":
        return True
    return isinstance(value, hint)


def _matches_generic(value: Any, origin: Any, args: tuple[Any, ...]) -> bool:
    if origin is type:
        wanted = args[0] if args else object
        return isinstance(value, type) and (
            not isinstance(wanted, type) or issubclass(value, wanted)
        )
    if origin is collections.abc.Callable:
        return callable(value)
    if not _matches_class(value, origin):
        return False
    if origin is tuple and args and args[-1] is not Ellipsis:
        return len(value) == len(args) and all(map(matches, value, args))
    if inspect.isclass(origin) and issubclass(origin, collections.abc.Mapping) and len(args) == 2:
        return all(matches(k, args[0]) and matches(v, args[1]) for k, v in value.items())
    if isinstance(value, (list, tuple)) and args:
        return all(matches(item, args[0]) for item in value)
    return True


def describe(hint: Any) -> str:
    """Write an annotation as a reader would: `int`, `tuple[str, ...] | None`."""
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return "None" if hint is type(None) else hint.__name__
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(describe(arg) for arg in args)
    if origin is Literal:
        return " or ".join(repr(arg) for arg in args)
    if origin is not None and args and origin is not collections.abc.Callable:
        inner = ", ".join("..." if arg is Ellipsis else describe(arg) for arg in args)
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    return str(hint).replace("typing.", "").replace("collections.abc.", "")


def remedy(value: Any, hint: Any) -> str:
    """Say how to write the value so that it fits; empty if there is no telling."""
    wanted = {hint, *typing.get_args(hint)} if _hashable(hint) else {hint}
    if isinstance(value, float) and int in wanted and value.is_integer():
        return str(int(value))
    if isinstance(value, str):
        if bool in wanted and value.lower() in ("true", "false"):
            return value.capitalize()
        for number in (int, float):
            if number in wanted and _is_number(value, number):
                return f"{value} without quotes"
    if isinstance(value, type) and not matches(value, hint):
        return f"@{value.__name__}() with parentheses, which builds one"
    if isinstance(value, list):
        changed: Any = tuple(value)
    elif isinstance(value, tuple):
        changed = list(value)
    else:
        changed = (value,)
    return repr(changed) if matches(changed, hint) else f"a value of type {describe(hint)}"


def _hashable(hint: Any) -> bool:
    return isinstance(hint, collections.abc.Hashable)


def _is_number(text: str, number: type) -> bool:
    try:
        number(text)
    except ValueError:
        return False
    return True

"""What a gin file says, before anything is built: statements and the values in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import gin.config_parser as config_parser


@dataclasses.dataclass(frozen=True)
class Site:
    """A place where a setting is written: a line of a gin file or of Python (fiddle), or a flag."""

    file: str
    line: int
    flag: str = ""  # "NAME=VALUE" if the place is the command line
    option: str = "--gin."  # what stands before it there

    def __str__(self) -> str:
        if self.flag:
            return f"command line: {self.option}{self.flag}"
        return f"{self.file}:{self.line}"

    @property
    def is_flag(self) -> bool:
        """Whether the place is the command line."""
        return bool(self.flag)


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%NAME` in a value."""

    name: str


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@scope/module.name` in a value, or `@scope/module.name()` if `calls`."""

    scope: tuple[str, ...]
    selector: str
    calls: bool
    target: Any = None  # the class or function, once resolved

    def __str__(self) -> str:
        return f"@{'/'.join((*self.scope, self.selector))}{'()' if self.calls else ''}"


REQUIRED = Macro("gin.REQUIRED")


@dataclasses.dataclass(frozen=True)
class Binding:
    """One statement `scope/module.name.parameter = value`, or `MACRO = value`."""

    scope: tuple[str, ...]
    selector: str  # as written; the name of the macro if `target` is None
    target: Any
    parameter: str  # empty for a macro
    value: Any
    site: Site

    @property
    def key(self) -> tuple[tuple[str, ...], Any, str]:
        """What the statement sets: a later statement with the same key overrides it."""
        if self.target is None:
            return ((), None, self.name)
        return (self.scope, self.target, self.parameter)

    @property
    def name(self) -> str:
        """What the statement sets, as written."""
        parts = [self.selector, self.parameter] if self.parameter else [self.selector]
        return "/".join((*self.scope, ".".join(parts)))


class Delegate(config_parser.ParserDelegate):
    """Makes gin's parser return our values; gin's own would look into its global registry."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        """Return a reference that is yet to be resolved."""
        *scope, selector = scoped_configurable_name.split("/")
        return Reference(tuple(scope), selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        """Return a macro that is yet to be looked up."""
        return Macro(macro_name)


def replace_references(value: Any, change: Callable[[Reference], Reference]) -> Any:
    """Copy a value with every reference in it changed."""
    if isinstance(value, Reference):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(replace_references(item, change) for item in value)
    if isinstance(value, dict):
        return {
            replace_references(key, change): replace_references(item, change)
            for key, item in value.items()
        }
    return value


def iterate(value: Any) -> Iterator[Any]:
    """Yield every macro, reference and literal in a value."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from iterate(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from iterate(key)
            yield from iterate(item)
    else:
        yield value

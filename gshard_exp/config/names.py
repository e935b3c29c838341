"""Turns names in gin files and flags into classes and functions (dynamic registration).

A file sees only what it imports itself, as in gin. A flag has no imports: it may use the tail of
any name that some file uses, the alias of any module that some file imports, or a full path.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import types
from collections.abc import Hashable
from typing import Any

import gin.config_parser as config_parser

from gshard_exp.config.errors import ConfigError, nearest, one_of
from gshard_exp.config.values import Site

DYNAMIC = "from __gin__ import dynamic_registration"


class Names:
    """Every class and function that the files have named so far, for flags and for printing."""

    def __init__(self) -> None:
        self.sources: dict[Any, tuple[str, str]] = {}  # target -> module, name inside it
        self.modules: dict[str, list[types.ModuleType]] = {}  # alias -> modules, over all files
        self._written: dict[str, set[Any]] = {}  # dotted name -> targets

    def add(self, target: Any, module: str, attributes: str, written: str = "") -> None:
        """Remember a target under its full name and as it was written."""
        self.sources.setdefault(target, (module, attributes))
        for name in (f"{module}.{attributes}", written):
            if name:
                self._written.setdefault(name, set()).add(target)

    def resolve_flag(self, selector: str, site: Site) -> Any:
        """Find the class or function that a flag means.

        Raises:
            ConfigError: none or several; names the nearest, or all that match.
        """
        tail = f".{selector}"
        matches = {
            target: name
            for name, targets in self._written.items()
            for target in targets
            if f".{name}".endswith(tail)
        }
        if not matches:
            matches = self._through_modules(selector)
        if len(matches) == 1:
            return next(iter(matches))
        if matches:
            full = sorted(".".join(self.sources[target]) for target in matches)
            raise ConfigError(
                f"'{selector}' means {len(matches)} things.",
                rule="The name must be long enough to mean one.",
                at=[str(site)],
                hint=one_of(full),
            )
        raise ConfigError(
            f"No gin file names a class or function '{selector}'.",
            rule="A flag can set what the gin files of this run use, or name it by its full path.",
            at=[str(site)],
            hint=one_of(nearest(selector, {_short(*source) for source in self.sources.values()})),
        )

    def _through_modules(self, selector: str) -> dict[Any, str]:
        first, *rest = selector.split(".")
        starts = [(module, rest) for module in self.modules.get(first, [])]
        starts += _import_prefix(selector)
        found: dict[Any, str] = {}
        for module, attributes in starts:
            chain = _follow(module, attributes) if attributes else None
            if chain is not None and _configurable(chain[-1]):
                self.add(chain[-1], *_source(chain, attributes))
                found[chain[-1]] = selector
        return found


class Symbols:
    """The imports of one file."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._modules: dict[str, types.ModuleType] = {}
        self._dynamic = False

    def add_import(self, statement: config_parser.ImportStatement, site: Site) -> None:
        """Import what the statement says.

        Raises:
            ConfigError: the module does not exist, or needs one that is not installed.
        """
        if statement.module == "__gin__.dynamic_registration":
            self._dynamic = True
            return
        if not self._dynamic:
            raise ConfigError(
                f"'{statement.format()}' stands before '{DYNAMIC}'.",
                rule="A gin file that imports modules opens with that line.",
                at=[str(site)],
                hint=f"put '{DYNAMIC}' above the first import",
            )
        try:
            module = importlib.import_module(statement.module)
        except ModuleNotFoundError as error:
            raise _missing_module(statement, site, error) from error
        except Exception as error:  # a mistake in code, not in the config
            error.add_note(f"while importing {statement.module} ({site})")
            raise
        alias = statement.bound_name()
        if not (statement.is_from or statement.alias):
            module = sys.modules[alias]  # `import a.b` binds a
        self._modules[alias] = module
        self._names.modules.setdefault(alias, [])
        if module not in self._names.modules[alias]:
            self._names.modules[alias].append(module)

    def resolve(self, selector: str, site: Site) -> Any:
        """Find the class or function that a name in this file means.

        Raises:
            ConfigError: names the nearest modules, classes or functions.
        """
        first, *rest = selector.split(".")
        if first not in self._modules:
            known = nearest(first, self._modules)
            raise ConfigError(
                f"'{selector}' starts with '{first}', which this file does not import.",
                rule="A gin file sees the modules that it imports itself.",
                at=[str(site)],
                hint=f"{one_of(known)}, or 'from ... import {first}'"
                if known
                else f"'{DYNAMIC}', then 'from ... import {first}'",
            )
        chain: list[Any] = [self._modules[first]]
        for depth, attribute in enumerate(rest):
            owner = chain[-1]
            if not hasattr(owner, attribute):
                prefix = ".".join([first, *rest[:depth]])
                raise ConfigError(
                    f"{prefix} has no '{attribute}'.",
                    rule=f"'{selector}' must name a class or function.",
                    at=[str(site)],
                    hint=one_of([f"{prefix}.{n}" for n in nearest(attribute, _public(owner))]),
                )
            chain.append(getattr(owner, attribute))
        if not rest or not _configurable(chain[-1]):
            raise ConfigError(
                f"'{selector}' is a {type(chain[-1]).__name__}.",
                rule="Only a class or function can be configured or built.",
                at=[str(site)],
                hint=one_of([f"{selector}.{n}" for n in nearest(selector, _public(chain[-1]))]),
            )
        self._names.add(chain[-1], *_source(chain, rest), written=selector)
        return chain[-1]


def _short(module: str, attributes: str) -> str:
    return f"{module.rsplit('.', 1)[-1]}.{attributes}"


def _source(chain: list[Any], attributes: list[str]) -> tuple[str, str]:
    """Return the innermost module of an attribute chain, and the rest of the names."""
    depth = max(i for i, owner in enumerate(chain) if isinstance(owner, types.ModuleType))
    return chain[depth].__name__, ".".join(attributes[depth:])


def _configurable(value: Any) -> bool:
    return callable(value) and isinstance(value, Hashable)


def _public(owner: Any) -> list[str]:
    """List what a module or class offers for configuring."""
    return [n for n in dir(owner) if not n.startswith("_") and callable(getattr(owner, n, None))]


def _follow(owner: Any, attributes: list[str]) -> list[Any] | None:
    chain = [owner]
    for attribute in attributes:
        if not hasattr(chain[-1], attribute):
            return None
        chain.append(getattr(chain[-1], attribute))
    return chain


def _import_prefix(selector: str) -> list[tuple[types.ModuleType, list[str]]]:
    """Import the longest leading part of a full path that is a module."""
    parts = selector.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            if importlib.util.find_spec(".".join(parts[:cut])) is None:
                continue
            return [(importlib.import_module(".".join(parts[:cut])), parts[cut:])]
        except (ImportError, ValueError):
            continue
    return []


def _missing_module(
    statement: config_parser.ImportStatement, site: Site, error: ModuleNotFoundError
) -> ConfigError:
    missing = error.name or statement.module
    if missing != statement.module and not statement.module.startswith(f"{missing}."):
        return ConfigError(
            f"{statement.module} needs the module '{missing}', which is not installed.",
            at=[str(site)],
            hint="install the extra of gshard_exp that brings it",
        )
    parent, _, child = missing.rpartition(".")
    if parent:
        paths = getattr(sys.modules.get(parent), "__path__", [])
        known = [f"{parent}.{info.name}" for info in pkgutil.iter_modules(paths)]
        hint = one_of(nearest(f"{parent}.{child}", known))
    else:
        hint = one_of(nearest(missing, [info.name for info in pkgutil.iter_modules()]))
    return ConfigError(
        f"There is no module '{missing}'.",
        rule="An import in a gin file names a module, not a class or function.",
        at=[str(site)],
        hint=hint,
    )

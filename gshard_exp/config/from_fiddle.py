"""Assembles fiddle configs: the second front end to the tree that gin files assemble.

A builder is a Python function that returns an `fdl.Config`. Values, types and errors are those of
gin files; the line that set a value is the one that fiddle's argument history remembers.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import fiddle as fdl
from fiddle import history
from fiddle.absl_flags.utils import CallExpression
from fiddle.experimental import auto_config

from gshard_exp.config import fiddle_presets, signatures
from gshard_exp.config.assemble import Assembled, realise, short_name
from gshard_exp.config.describe import NoSyntax, add_source, describe
from gshard_exp.config.errors import ConfigError, nearest, one_of
from gshard_exp.config.fiddle_paths import set_at
from gshard_exp.config.parse import Program
from gshard_exp.config.provenance import CallNode, Node, Where
from gshard_exp.config.to_fiddle import of_gin
from gshard_exp.config.values import Binding, Site

# `selectors.select(...).set(...)` sets what its caller says: that is the line to name.
history.add_exclude_location("fiddle/_src/selectors.py")

T = TypeVar("T")
# What a run changes most often keeps its gin macro in `config.gin`.
_MACROS = {"model_dir": "MODEL_DIR", "train_steps": "TRAIN_STEPS"}
Sites = Mapping[tuple[int, Any], Site]  # id of a config or container, argument or key -> the flag


def assemble_fiddle(
    root: type[T], expression: str, assignments: Sequence[str] = (), **unset: Any
) -> Assembled[T]:
    """Call a builder, change its config by flags, build and validate.

    Args:
        root: class that the config has to build.
        expression: of `--fdl_config`, see `load`.
        assignments: `PATH=VALUE` of `--fdl_set`, in order.
        **unset: values for arguments of the root that nothing sets.

    Raises:
        ConfigError: any mistake in the flags, or in what the builder set.
    """
    config = load(expression)
    target = fdl.get_callable(config)
    if not (isinstance(target, type) and issubclass(target, root)):
        raise ConfigError(
            f"--fdl_config={expression} builds {short_name(target)}.",
            rule=f"A run is made from an fdl.Config of {short_name(root)}.",
            at=[f"command line: --fdl_config={expression}"],
        )
    sites = {}
    for assignment in assignments:
        place = set_at(config, assignment)
        sites[place] = Site("", 0, flag=assignment, option="--fdl_set=")
    for name, value in unset.items():
        if name not in fdl.ordered_arguments(config):
            setattr(config, name, value)
    origin = Where(Site("", 0, flag=expression, option="--fdl_config="))
    reader = _Reader(sites, origin)
    call = reader.node(config, origin, "")
    assert isinstance(call, CallNode)
    return Assembled(call.value, call, reader.program)


def load(expression: str) -> fdl.Config:
    """Return the config that `--fdl_config` asks for; nobody else holds it.

    Args:
        expression: a preset (`moe_2048e_36l`), `package.module:function` (or with a dot), either
            with literal arguments in brackets, or a gin file.

    Raises:
        ConfigError: there is no such builder, its arguments do not fit, or it returns no config.
    """
    at = [f"command line: --fdl_config={expression}"]
    if expression.endswith(".gin"):
        return of_gin(expression)
    try:
        call = CallExpression.parse(re.sub(r"^([\w.]+):(?=\w)", r"\1.", expression))
    except SyntaxError as error:
        raise ConfigError(
            f"Cannot read '{expression}': {error.msg}.",
            rule="It names a function, which may have literal arguments in brackets.",
            at=at,
            hint='--fdl_config=NAME, --fdl_config=module:function or --fdl_config="NAME(x=1)"',
        ) from error
    builder = _builder(call.func_name, at)
    if auto_config.is_auto_config(builder):
        builder = builder.as_buildable  # type: ignore[attr-defined]
    try:
        inspect.signature(builder).bind(*(call.args or ()), **(call.kwargs or {}))
    except TypeError as error:
        raise ConfigError(
            f"{call.func_name}: {error}.",
            rule=f"It is called as {call.func_name}{inspect.signature(builder)}.",
            at=at,
        ) from error
    try:
        config = builder(*(call.args or ()), **(call.kwargs or {}))
    except ConfigError as error:  # of a gin file that the builder reads
        inner = [place for place in error.at if not place.startswith("command line: --gin_file")]
        raise ConfigError(
            error.problem, rule=error.rule, at=[*at, *inner], hint=error.hint
        ) from error
    if not isinstance(config, fdl.Config):
        raise ConfigError(
            f"{call.func_name} returns a {type(config).__name__}.",
            rule="A builder returns an fdl.Config.",
            at=at,
        )
    return copy.deepcopy(config)


def presets() -> dict[str, Callable[..., fdl.Config]]:
    """List the builders that go by their bare name."""
    return {"of_gin": of_gin} | _functions(fiddle_presets)


def _builder(name: str, at: Sequence[str]) -> Callable[..., Any]:
    module_name, _, function = name.rpartition(".")
    if not module_name:
        known = presets()
        if name in known:
            return known[name]
        raise ConfigError(
            f"There is no fiddle builder '{name}'.",
            rule="A bare name is one of the presets; another builder is module:function.",
            at=at,
            hint=one_of(nearest(name, known)),
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses one that it imports
        raise ConfigError(
            f"There is no module '{error.name}'.",
            rule="The part before the colon is a module that Python can import.",
            at=at,
            hint=f"a preset ({one_of(nearest(function, presets()))}), or a module in this folder",
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        offered = _functions(module)
        raise ConfigError(
            f"{module_name} has no function '{function}'.",
            at=at,
            hint=one_of([f"{module_name}:{n}" for n in nearest(function, offered)]),
        )
    return found


def _functions(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    """List the public functions that a module defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


class _Reader:
    """Turns configs into nodes, builds their values, and notes what `config.gin` needs."""

    def __init__(self, sites: Sites, origin: Where) -> None:
        self.program = Program()
        self._sites = sites
        self._origin = origin
        self._made: dict[int, CallNode] = {}

    def node(self, value: Any, where: Where, path: str) -> Node:
        """Describe and build a config, a container or a plain value."""
        if isinstance(value, fdl.Buildable):
            if id(value) not in self._made:  # one config in two places makes one object
                self._made[id(value)] = self._call(value, where, path)
            return self._made[id(value)]
        if type(value) in (list, tuple, dict):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            items = {
                key: self.node(item, self._where(value, key, where), f"{path}[{key!r}]")
                for key, item in pairs
            }
            values = {key: item.value for key, item in items.items()}
            whole = values if type(value) is dict else type(value)(values.values())
            return Node(whole, where, items=items)
        try:
            return describe(value, self.program.names.sources, where, private=True)
        except NoSyntax:
            raise ConfigError(
                f"{path} is {value!r:.100}, which config.gin cannot hold.",
                rule="It takes literals, lists, tuples, dicts, dataclasses, and classes and "
                "functions of a module.",
                at=[str(where)],
            ) from None

    def _call(self, config: fdl.Buildable, where: Where, path: str) -> CallNode:
        target, kind = fdl.get_callable(config), type(config)
        given = fdl.ordered_arguments(config)
        if kind not in (fdl.Config, fdl.Partial) or any(isinstance(n, int) for n in given):
            raise ConfigError(
                f"{path or 'the root'} is an fdl.{kind.__name__} of {short_name(target)}.",
                rule="fdl.Config and fdl.Partial with named arguments can be run.",
                at=[str(where)],
            )
        try:
            add_source(target, self.program.names.sources, private=True)
        except NoSyntax:
            raise ConfigError(
                f"{path or 'the root'} builds {target!r:.100}, which cannot be imported.",
                rule="config.gin names classes and functions by module.",
                at=[str(where)],
            ) from None
        arguments = {}
        for name, value in given.items():
            inner = f"{path}.{name}" if path else str(name)
            arguments[str(name)] = self.node(value, self._where(config, name, where), inner)
            if not path and name in _MACROS:
                self._add_macro(_MACROS[str(name)], arguments[str(name)])
        order = list(signatures.parameters(target))
        ordered = sorted(arguments, key=lambda n: order.index(n) if n in order else len(order))
        arguments = {name: arguments[name] for name in ordered}
        node = CallNode(None, where, target=target, arguments=arguments, calls=kind is fdl.Config)
        realise(node, f"--fdl_set={path + '.' if path else ''}{{}}=VALUE, or set it in the builder")
        return node

    def _add_macro(self, name: str, node: Node) -> None:
        node.macros = (name,)
        site = node.where.site or Site("", 0)
        self.program.bindings.append(Binding((), name, None, "", node.value, site))

    def _where(self, owner: Any, key: Any, outer: Where) -> Where:
        if (id(owner), key) in self._sites:
            return Where(self._sites[id(owner), key])
        if not isinstance(owner, fdl.Buildable):
            return outer
        entries = owner.__argument_history__[key]
        if not entries:  # fiddle filled it in, as it does what a default factory makes
            return outer
        location = entries[-1].location
        if location.filename == __file__:  # what `--fdl_config` itself says
            return self._origin
        return Where(Site(_shown(location.filename), location.line_number))


def _shown(filename: str) -> str:
    """Write a file as its reader knows it: from our folder or the current one, if it lies there."""
    ours = Path(__file__).resolve().parents[2]
    for folder in (ours, Path.cwd()):
        if Path(filename).is_absolute() and Path(filename).is_relative_to(folder):
            return str(Path(filename).relative_to(folder))
    return filename

"""Builds the tree of dataclasses that gin files and flags describe.

gin's meaning, without gin's global state: a later statement wins; a reference is built anew each
time it is read; a scope adds its own bindings over the plain ones. One difference: `@f` without
parentheses has its arguments bound when the tree is assembled, not when `f` is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from gshard_exp.config import check, provenance, signatures, usage
from gshard_exp.config.errors import ConfigError, nearest, one_of
from gshard_exp.config.flatten import Bound
from gshard_exp.config.parse import Program, parse
from gshard_exp.config.provenance import CallNode, Node, Where
from gshard_exp.config.values import REQUIRED, Binding, Macro, Reference
from gshard_exp.errors import SettingError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Assembled(Generic[T]):
    """A tree and who set what in it.

    Args:
        tree: the root dataclass.
        call: provenance of the tree, for `where` and `operative_config`.
        program: the statements that it was built from.
    """

    tree: T
    call: CallNode
    program: Program

    @property
    def files(self) -> tuple[str, ...]:
        """The gin files that were read, each include after the file that includes it."""
        return tuple(self.program.files)

    def where(self, path: str) -> Where:
        """Say where the value at `'model.encoder.repeats'` was set; `str` of it is for users.

        Raises:
            KeyError: the tree has nothing at that path.
        """
        found: Any = self.tree
        for step in provenance.steps_of(path):
            found = _child(found, step, path)
        return provenance.find(self.call, path)

    def error(
        self, problem: str, *, paths: Sequence[str] = (), rule: str = "", hint: str = ""
    ) -> ConfigError:
        """Make the error that says where each of `paths` was set."""
        return ConfigError(problem, rule=rule, at=_places(self.call, paths), hint=hint)

    def explain(self, error: ValueError) -> ConfigError:
        """Turn an error of a lower room (`SettingError`; paths from the root) into ours."""
        return _refusal(self.call, error)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn a `SettingError` of what runs inside into ours, by `explain`."""
        try:
            yield
        except SettingError as error:
            raise self.explain(error) from error


def assemble(
    root: type[T],
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
) -> Assembled[T]:
    """Parse, build and validate.

    Args:
        root: class of the tree's root. Files may bind its parameters, or leave it alone.
        gin_files: in order; later ones win.
        bindings: `NAME=VALUE` from the command line; these win over every file.
        search_paths: folders for `gin_files` and includes, after the current one, before ours.

    Raises:
        ConfigError: any mistake in the files or flags.
    """
    return build(root, parse(root, gin_files, bindings, search_paths))


def build(root: type[T], program: Program) -> Assembled[T]:
    """Build and validate what statements that are parsed already describe.

    Raises:
        ConfigError: any mistake in them.
    """
    builder = _Builder(program)
    call = builder.build(root, (), provenance.DEFAULT, calls=True)
    usage.check(program, builder.consumed, builder.in_force, builder.macros_read)
    return Assembled(call.value, call, program)


class _Builder:
    """Evaluates references and macros, and notes which bindings took part."""

    def __init__(self, program: Program) -> None:
        self.consumed: set[Any] = set()  # keys looked up for something that was built
        self.in_force: set[Any] = set()  # keys whose value was used (a scope may hide another)
        self.macros_read: set[str] = set()
        self._macros: dict[str, Binding] = {}
        self._by_target: dict[Any, dict[str, Binding]] = {}
        self._stack: list[Any] = []
        self._program = program
        for binding in program.final().values():
            if binding.target is None:
                self._macros[binding.name] = binding
            else:
                group = self._by_target.setdefault((binding.scope, binding.target), {})
                group[binding.parameter] = binding

    def build(self, target: Any, scope: tuple[str, ...], where: Where, calls: bool) -> CallNode:
        """Build `@scope/target()`, or bind the arguments of `@scope/target`."""
        key = (target, scope)
        if key in self._stack:
            raise _cycle(f"{target.__name__} is built from itself.", where)
        self._stack.append(key)
        arguments = {}
        for name, binding in self._bindings_of(target, scope).items():
            arguments[name] = self._evaluate(binding.value, Where(binding.site), scope)
        self._stack.pop()
        node = CallNode(None, where, (), None, target, scope, arguments, calls)
        name = short_name(target)
        realise(node, f"{name}.{{}} = ... in a gin file, or the same as a flag")
        return node

    def _bindings_of(self, target: Any, scope: tuple[str, ...]) -> dict[str, Binding]:
        chosen: dict[str, Binding] = {}
        for depth in range(len(scope) + 1):
            found = self._by_target.get((scope[:depth], target), {})
            self.consumed.update(binding.key for binding in found.values())
            chosen.update(found)
        self.in_force.update(binding.key for binding in chosen.values())
        order = list(signatures.parameters(target))
        return dict(
            sorted(chosen.items(), key=lambda c: order.index(c[0]) if c[0] in order else len(order))
        )

    def _evaluate(self, value: Any, where: Where, scope: tuple[str, ...]) -> Node:
        if isinstance(value, Macro):
            return self._read_macro(value, where)
        if isinstance(value, Reference):
            return self.build(value.target, value.scope or scope, where, value.calls)
        if isinstance(value, (list, tuple)):
            nodes = [self._evaluate(item, where, scope) for item in value]
            made = type(value)(node.value for node in nodes)
            return Node(made, where, items=dict(enumerate(nodes)))
        if isinstance(value, dict):
            items = {
                self._evaluate(key, where, scope).value: self._evaluate(item, where, scope)
                for key, item in value.items()
            }
            return Node({key: node.value for key, node in items.items()}, where, items=items)
        return Node(value, where)

    def _read_macro(self, macro: Macro, where: Where) -> Node:
        if macro == REQUIRED or macro.name not in self._macros:
            raise self._no_value(macro, where)
        if macro in self._stack:
            raise _cycle(f"The macro {macro.name} is made from itself.", where)
        self._stack.append(macro)
        self.macros_read.add(macro.name)
        binding = self._macros[macro.name]
        inner = Where(binding.site, (*where.macros, macro.name), where.read_at or where.site)
        node = self._evaluate(binding.value, inner, tuple(macro.name.split("/")))
        self._stack.pop()
        node.macros = (macro.name, *node.macros)
        return node

    def _no_value(self, macro: Macro, where: Where) -> ConfigError:
        if macro != REQUIRED:
            close = [f"%{name}" for name in nearest(macro.name, self._macros)]
            known = f", or one of the macros that are set: {one_of(close)}" if close else ""
            return ConfigError(
                f"%{macro.name} is read, but nothing sets {macro.name}.",
                rule="A macro without a value has to be chosen by a later file or a flag.",
                at=[str(where.read_at or where.site)],
                hint=f"--gin.{macro.name}=VALUE{known}",
            )
        # The statement that says `= %gin.REQUIRED` names what is required.
        name = next(b.name for b in self._program.bindings if b.site == where.site)
        hint = f"--gin.{name}=VALUE"
        unread = set(self._macros) - self._program.macros_mentioned()
        for other in nearest(name, unread, count=1):
            hint += f" ({other}, set at {self._macros[other].site}, is read by nothing)"
        return ConfigError(
            f"{name} has no value yet.",
            rule="It is declared as required (%gin.REQUIRED): each run has to choose it.",
            at=[str(where)],
            hint=hint,
        )


def _cycle(problem: str, where: Where) -> ConfigError:
    return ConfigError(problem, rule="Building must end somewhere.", at=[str(where)])


def short_name(target: Any) -> str:
    """Name a class or function as gin files do: last part of its module, and its own name."""
    return f"{target.__module__.rsplit('.', 1)[-1]}.{target.__qualname__}"


def _check_type(target: Any, name: str, node: Node) -> None:
    hints = signatures.types(target)
    if name not in hints or check.matches(node.value, hints[name]):
        return
    default = signatures.default_of(target, name)
    if default is not inspect.Parameter.empty and not check.matches(default, hints[name]):
        return  # the annotation is looser than it says, as in `dtype: jnp.dtype = jnp.float32`
    value = node.value
    said = f"{value.__name__} (a class)" if isinstance(value, type) else repr(value)
    if len(said) > 200:
        said = f"{said[:200]}..."
    raise ConfigError(
        f"{short_name(target)}.{name} is {said}, of type {type(value).__name__}.",
        rule=f"It must be of type {check.describe(hints[name])}.",
        at=[str(node.where)],
        hint=check.remedy(value, hints[name]),
    )


def realise(node: CallNode, remedy: str) -> None:
    """Make the value of a call whose arguments are made: what both front ends end in.

    Args:
        node: its `value` is set.
        remedy: how to set a parameter that is missing; `{}` stands for its name.

    Raises:
        ConfigError: a wrong type, a missing parameter, or what the constructor refuses.
    """
    for name, argument in node.arguments.items():
        _check_type(node.target, name, argument)
    keywords = {name: argument.value for name, argument in node.arguments.items()}
    if node.calls:
        node.value = _construct(node, keywords, remedy)
    else:
        node.value = Bound(node.target, **keywords) if keywords else node.target


def _construct(node: CallNode, keywords: dict[str, Any], remedy: str) -> Any:
    name = short_name(node.target)
    missing = [
        parameter.name
        for parameter in signatures.parameters(node.target).values()
        if parameter.default is inspect.Parameter.empty and parameter.name not in keywords
    ]
    if missing:
        raise ConfigError(
            f"{name} is built without {one_of(missing).replace(' or ', ' and ')}.",
            rule="A parameter without a default has to be chosen.",
            at=[str(node.where)] if node.where.site else [],
            hint=remedy.format(missing[0]),
        )
    try:
        return node.target(**keywords)
    except ConfigError:
        raise
    except ValueError as error:
        raise _refusal(node, error) from error
    except Exception as error:  # a mistake in code, not in the config: the traceback is wanted
        error.add_note(f"while building {name} ({node.where})")
        raise


def _refusal(node: CallNode, error: ValueError) -> ConfigError:
    """Say where the settings were set that a constructor refuses.

    An error that does not name them blames those whose names occur in its text.
    """
    problem = getattr(error, "problem", str(error))
    settings = getattr(error, "settings", ()) or [
        name for name in node.arguments if re.search(rf"\b{re.escape(name)}\b", problem)
    ]
    if not hasattr(error, "settings"):
        problem = f"{short_name(node.target)}: {problem}"
    at = _places(node, settings)
    if not at and node.where.site:
        at = [str(node.where)]
    return ConfigError(problem, at=at, hint=getattr(error, "hint", ""))


def _child(value: Any, step: Any, path: str) -> Any:
    try:
        if isinstance(value, Bound):
            return value.keywords[step]
        if isinstance(value, (list, tuple, Mapping)):
            return value[step]
        return getattr(value, step)
    except (AttributeError, LookupError, TypeError):
        raise KeyError(f"the tree has no '{path}': no '{step}' in {type(value).__name__}") from None


def _places(node: CallNode, paths: Sequence[str]) -> list[str]:
    return [provenance.find(node, path).of(path) for path in paths]

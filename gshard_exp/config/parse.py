"""Reads gin files and flags into a list of bindings, each with the place where it is written.

The syntax is gin's own (its parser does the reading). Unlike `gin.parse_config` nothing is
registered globally, so that any number of configs can be assembled in one process.
"""

from __future__ import annotations

import dataclasses
import io
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gin.config_parser as config_parser

from gshard_exp.config import signatures
from gshard_exp.config.errors import ConfigError, nearest, one_of
from gshard_exp.config.names import Names, Symbols
from gshard_exp.config.search import find_gin_file, search_roots
from gshard_exp.config.values import (
    REQUIRED,
    Binding,
    Delegate,
    Macro,
    Reference,
    Site,
    iterate,
    replace_references,
)

# A flag's value that opens like this was meant as a gin value; anything else that gin cannot
# read is taken as a string.
_GIN_OPENINGS = ("[", "(", "{", '"', "'", "@", "%")


@dataclasses.dataclass
class Program:
    """All statements of a run in the order in which they take effect."""

    names: Names = dataclasses.field(default_factory=Names)
    bindings: list[Binding] = dataclasses.field(default_factory=list)
    files: list[str] = dataclasses.field(default_factory=list)

    def macros_mentioned(self) -> set[str]:
        """Return the macros that some statement reads, be it overridden or not."""
        return {
            item.name
            for binding in self.bindings
            for item in iterate(binding.value)
            if isinstance(item, Macro) and item != REQUIRED
        }

    def final(self) -> dict[Any, Binding]:
        """Return the binding that is in force for each key: the last one."""
        return {binding.key: binding for binding in self.bindings}


def binding_from_flag(flag: str) -> str:
    """Turn `--gin.TRAIN_STEPS=100` into `TRAIN_STEPS=100`.

    Raises:
        ConfigError: the flag has no name or no `=`.
    """
    name, equals, value = flag.removeprefix("--gin.").partition("=")
    if not equals or not name.strip() or not flag.startswith("--gin."):
        raise ConfigError(
            f"'{flag}' sets nothing.",
            rule="A setting on the command line is one word with a name and a value.",
            at=["command line"],
            hint="--gin.NAME=VALUE or --gin.module.Class.parameter=VALUE",
        )
    return f"{name}={value}"


def parse(
    root: type,
    gin_files: Sequence[str],
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
) -> Program:
    """Read the files in order, then the flags.

    Args:
        root: the class of the tree's root; flags may name it even if no file does.
        gin_files: paths, absolute or to be searched for.
        bindings: `NAME=VALUE`, as of `binding_from_flag`.
        search_paths: the user's folders, before ours.

    Raises:
        ConfigError: anything that can be found wrong without building the tree.
    """
    program = Program()
    program.names.add(root, root.__module__, root.__qualname__)
    roots = search_roots(search_paths)
    for name in gin_files:
        _read_file(program, name, roots, f"command line: --gin_file={name}", ())
    for binding in bindings:
        _read_flag(program, binding)
    return program


def _read_file(
    program: Program, name: str, roots: Sequence[Path], asked_at: str, including: tuple[Path, ...]
) -> None:
    path, shown = find_gin_file(name, roots, asked_at)
    path = path.resolve()
    if path in including:
        raise ConfigError(
            f"'{name}' includes itself.", rule="Includes must end somewhere.", at=[asked_at]
        )
    program.files.append(shown)
    symbols = Symbols(program.names)
    for statement in _statements(_text(path, shown), shown):
        site = Site(shown, statement.location.line_num)
        if isinstance(statement, config_parser.ImportStatement):
            symbols.add_import(statement, site)
        elif isinstance(statement, config_parser.IncludeStatement):
            _read_file(program, statement.filename, roots, str(site), (*including, path))
        elif isinstance(statement, config_parser.BindingStatement):
            program.bindings.append(_binding(statement, site, symbols))
        else:  # the head of a block, whose bindings follow as statements of their own
            symbols.resolve(statement.selector, site)


def _text(path: Path, shown: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"'{shown}' is no text: {error.reason} at byte {error.start}.",
            rule="A gin file is text in UTF-8.",
            at=[shown],
        ) from error


def _statements(text: str, file: str) -> Iterator[Any]:
    """Yield gin's statements; report what is no gin as a ConfigError with its line."""
    try:
        yield from config_parser.ConfigParser(io.StringIO(text), Delegate())
    except SyntaxError as error:  # gin's, or the tokenizer's for a wrong indentation
        message, line = error.msg, error.lineno or 1
        location = error.args[1] if len(error.args) > 1 else None
        if isinstance(location, config_parser.Location):
            line = location.line_num
        content = _line(text, line)
    except tokenize.TokenError as error:
        message, (line, _) = error.args
        line = _open_bracket(text) or line
        content = _line(text, line)
    else:
        return
    reason = message.strip().splitlines()[0].rstrip(".")
    raise ConfigError(
        f"Cannot read '{content}': {reason}.",
        rule="Values are Python literals, %MACRO, @module.name or @module.name().",
        at=[f"{file}:{line}"],
        hint="put strings in quotes, and close every bracket and quote",
    )


def _open_bracket(text: str) -> int | None:
    """Return the line of the first bracket that is never closed."""
    opened: list[int] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.OP and token.string in "([{":
                opened.append(token.start[0])
            elif token.type == tokenize.OP and token.string in ")]}" and opened:
                opened.pop()
    except (tokenize.TokenError, SyntaxError):
        pass
    return opened[0] if opened else None


def _line(text: str, number: int) -> str:
    lines = text.splitlines() or [""]
    return lines[min(max(number, 1), len(lines)) - 1].strip()


class _FlagSymbols:
    """Resolves names of a flag with the interface of `Symbols`."""

    def __init__(self, names: Names) -> None:
        self.resolve = names.resolve_flag


def _read_flag(program: Program, flag: str) -> None:
    name, equals, value = flag.partition("=")
    name, value = name.strip(), value.strip()
    site = Site("", 0, flag=flag)
    if not equals or not name:
        binding_from_flag(f"--gin.{flag}")  # raises
    statement = _one_statement(f"{name} = {value}")
    if statement is None:
        if value.startswith(_GIN_OPENINGS):
            raise ConfigError(
                f"Cannot read the value {value}.",
                rule="Values are Python literals, %MACRO, @module.name or @module.name().",
                at=[str(site)],
                hint="close every bracket and quote, and quote the whole word for the shell",
            )
        statement = _one_statement(f"{name} = {value!r}")
    if statement is None:
        raise ConfigError(
            f"'{name}' is not a name that can be set.",
            at=[str(site)],
            hint="--gin.NAME=VALUE or --gin.module.Class.parameter=VALUE",
        )
    program.bindings.append(_binding(statement, site, _FlagSymbols(program.names)))


def _one_statement(text: str) -> config_parser.BindingStatement | None:
    try:
        statements = list(config_parser.ConfigParser(io.StringIO(text), Delegate()))
    except (SyntaxError, tokenize.TokenError):
        return None
    if len(statements) == 1 and isinstance(statements[0], config_parser.BindingStatement):
        return statements[0]
    return None


def _binding(
    statement: config_parser.BindingStatement, site: Site, symbols: Symbols | _FlagSymbols
) -> Binding:
    scope = tuple(part for part in statement.scope.split("/") if part)

    def resolve(reference: Reference) -> Reference:
        target = symbols.resolve(reference.selector, site)
        return dataclasses.replace(reference, target=target)

    value = replace_references(statement.value, resolve)
    if not statement.arg_name:
        return Binding(scope, statement.selector, None, "", value, site)
    target = symbols.resolve(statement.selector, site)
    _check_parameter(statement.selector, target, statement.arg_name, site)
    return Binding(scope, statement.selector, target, statement.arg_name, value, site)


def _check_parameter(selector: str, target: Any, parameter: str, site: Site) -> None:
    known = signatures.parameters(target)
    if parameter in known or signatures.takes_any_keyword(target):
        return
    offered = [name for name in known if not signatures.is_linens_own(target, name)]
    raise ConfigError(
        f"{selector} has no parameter '{parameter}'.",
        rule=f"It takes {len(offered)} parameters." if offered else "It takes no parameters.",
        at=[str(site)],
        hint=one_of(nearest(parameter, offered)),
    )

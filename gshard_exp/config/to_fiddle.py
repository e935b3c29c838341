"""Turns what gin files assemble into a fiddle config, and a fiddle config into Python code."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import fiddle as fdl
from fiddle import history
from fiddle.codegen import codegen

from gshard_exp.config.assemble import Assembled
from gshard_exp.config.provenance import CallNode, Node
from gshard_exp.config.reading import read_files
from gshard_exp.config.values import Site

# A macro that is given to `of_gin` was set by the line that calls it.
history.add_exclude_location("gshard_exp/config/to_fiddle.py")

_WIDTH = 100
_INDENT = "    "


def of_gin(*gin_files: str, **settings: Any) -> fdl.Config:
    """Return the fiddle config of gin files: to go on from in Python, or to build.

    Its argument history says which line of which gin file set what. A place of the machine that
    the files leave to the run (`MODEL_DIR`) is left unset.

    Args:
        *gin_files: as `--gin_file`; the later win.
        **settings: macros, as `--gin.NAME=VALUE`; literals only.

    Raises:
        ConfigError: any mistake in the files.
    """
    bindings = [f"{name}={value!r}" for name, value in settings.items()]
    subject = read_files(", ".join(gin_files), gin_files, bindings)
    return fiddle_config(subject.assembled, subject.open_places)


def fiddle_config(assembled: Assembled[Any], unset: Sequence[str] = ()) -> fdl.Config:
    """Return a config that fiddle builds into an equal tree.

    Functions that gin calls, such as the list of sources, stay calls. What nobody set is left
    unset.

    Args:
        assembled: of gin files or of fiddle.
        unset: values of arguments that are to be left unset too: places that a run has to choose.
    """
    return _Converter(unset).value(assembled.call)


def fiddle_code(assembled: Assembled[Any], name: str = "config", unset: Sequence[str] = ()) -> str:
    """Write an experiment as a Python module with one function, which returns its fiddle config.

    Args:
        assembled: of gin files or of fiddle.
        name: of the function.
        unset: as of `fiddle_config`.
    """
    code = codegen.new_codegen(fiddle_config(assembled, unset), top_level_fixture_name=name)
    (function,) = (n for n in ast.parse(code).body if isinstance(n, ast.FunctionDef))
    lines = code.splitlines()[: function.lineno]
    for statement in function.body:  # fiddle writes assignments of what is shared, and a return
        if isinstance(statement, ast.Assign):
            start = f"{ast.unparse(statement.targets[0])} = "
        else:
            assert isinstance(statement, ast.Return)
            start = "return "
        assert statement.value is not None
        lines.append(f"{_INDENT}{start}{_laid_out(statement.value, 1)}")
    return "\n".join(lines) + "\n"


class _Converter:
    """Turns nodes into configs; one node in two places stays one config."""

    def __init__(self, unset: Sequence[str]) -> None:
        self._unset = unset
        self._made: dict[int, fdl.Buildable] = {}

    def value(self, node: Node) -> Any:
        if isinstance(node, CallNode):
            if not node.calls and not node.arguments:
                return node.target
            if id(node) not in self._made:
                self._made[id(node)] = self._config(node)
            return self._made[id(node)]
        if node.items is None:
            return node.value
        items = {key: self.value(item) for key, item in node.items.items()}
        return items if isinstance(node.value, dict) else type(node.value)(items.values())

    def _config(self, node: CallNode) -> fdl.Buildable:
        config = (fdl.Config if node.calls else fdl.Partial)(node.target)
        for name, argument in node.arguments.items():
            if isinstance(argument.value, str) and argument.value in self._unset:
                continue
            value = self.value(argument)
            location = _location(argument.where.site)
            if location is None:
                setattr(config, name, value)
                continue
            with history.custom_location(lambda found=location: found):
                setattr(config, name, value)
        return config


def _location(site: Site | None) -> history.Location | None:
    if site is None or site.is_flag:
        return None
    return history.Location(site.file, site.line, None)


def _laid_out(node: ast.expr, depth: int) -> str:
    """Write an expression with one argument or item a line where it is too long for one."""
    text = ast.unparse(node)
    if len(text) + len(_INDENT) * depth + 12 <= _WIDTH:
        return text
    if isinstance(node, ast.Call):
        positional = [_laid_out(argument, depth + 1) for argument in node.args]
        named = [f"{key.arg}={_laid_out(key.value, depth + 1)}" for key in node.keywords]
        return _broken(f"{ast.unparse(node.func)}(", [*positional, *named], ")", depth)
    if isinstance(node, (ast.List, ast.Tuple)):
        left, right = "[]" if isinstance(node, ast.List) else "()"
        return _broken(left, [_laid_out(item, depth + 1) for item in node.elts], right, depth)
    if isinstance(node, ast.Dict) and all(node.keys):
        items = [
            f"{ast.unparse(key)}: {_laid_out(value, depth + 1)}"
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        ]
        return _broken("{", items, "}", depth)
    return text


def _broken(left: str, items: Sequence[str], right: str, depth: int) -> str:
    inner = "".join(f"{_INDENT * (depth + 1)}{item},\n" for item in items)
    return f"{left}\n{inner}{_INDENT * depth}{right}"

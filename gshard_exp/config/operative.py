"""Writes an assembled config as gin text that assembles to the same tree, from any folder.

Files and includes are gone: each parameter of each object is one line, defaults included, with a
comment that says who set it. Macros stay where they hold plain values, so that the `config.gin`
of a run can be changed by the same flags as the files it came from. Objects of a class that
occurs more than once get a scope of their own.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gshard_exp.config import signatures
from gshard_exp.config.assemble import Assembled
from gshard_exp.config.describe import NoSyntax, describe
from gshard_exp.config.names import DYNAMIC
from gshard_exp.config.provenance import CallNode, Node

_WIDTH = 88
HEADER = "# Assembled by gshard_exp: every setting in force, and who set it."


def operative_config(assembled: Assembled[Any], required: Sequence[str] = ()) -> str:
    """Return gin text with one commented line a parameter; see the module's docstring.

    Args:
        assembled: of gin files or of fiddle.
        required: strings in the tree that are written as `%gin.REQUIRED`.
    """
    text = _Printer(assembled).text()
    for value in required:
        text = text.replace(repr(value), "%gin.REQUIRED")
    return text


class _Printer:
    def __init__(self, assembled: Assembled[Any]) -> None:
        self._sources = dict(assembled.program.names.sources)
        self._final = assembled.program.final()
        self._aliases: dict[str, str] = {}  # module -> its name in the text
        self._macros: dict[str, str] = {}  # name -> statement
        self._blocks: dict[str, list[str]] = {}  # path of an object -> its lines
        self._unprintable: dict[int, dict[str, Any]] = {}  # id of a node -> defaults left out
        self._root = self._with_defaults(assembled.call)
        self._count: Counter[Any] = Counter()
        self._count_targets(self._root)
        self._scopes: set[str] = set()

    def text(self) -> str:
        self._write_object(self._root, "", "")
        imports = sorted(_import_line(module, alias) for module, alias in self._aliases.items())
        parts = [f"{HEADER}\n{DYNAMIC}\n" + "\n".join(imports)]
        if self._macros:
            parts.append("\n".join(self._macros[name] for name in sorted(self._macros)))
        parts += ["\n".join([f"# {path}", *lines]) for path, lines in self._blocks.items()]
        return "\n\n".join(parts) + "\n"

    def _with_defaults(self, node: Node) -> Node:
        """Copy the provenance tree with every default added that gin can write."""
        if node.items is not None:
            items = {key: self._with_defaults(item) for key, item in node.items.items()}
            return dataclasses.replace(node, items=items)
        if not isinstance(node, CallNode):
            return node
        arguments = {name: self._with_defaults(item) for name, item in node.arguments.items()}
        copied = dataclasses.replace(node, arguments=arguments)
        left_out = self._unprintable.setdefault(id(copied), {})
        for name in signatures.parameters(node.target) if node.calls else ():
            if name in arguments or signatures.is_linens_own(node.target, name):
                continue
            default = signatures.default_of(node.target, name)
            if default is inspect.Parameter.empty:
                continue
            try:
                arguments[name] = describe(default, self._sources)
            except NoSyntax:
                left_out[name] = default
        order = [name for name in signatures.parameters(node.target) if name in arguments]
        copied.arguments = {name: arguments[name] for name in (*order, *arguments)}
        return copied

    def _count_targets(self, node: Node) -> None:
        if isinstance(node, CallNode):
            self._count[node.target] += 1
            for argument in node.arguments.values():
                self._count_targets(argument)
        for item in (node.items or {}).values():
            self._count_targets(item)

    def _write_object(self, node: Node, path: str, scope: str) -> None:
        """Write the bindings of one object; those of the objects in it follow in their turn."""
        assert isinstance(node, CallNode)
        lines = self._blocks.setdefault(path or "the root", [])
        prefix = f"{scope}{self._selector(node.target)}"
        for name, argument in node.arguments.items():
            text = self._expression(argument, f"{path}.{name}" if path else name)
            site = argument.where.site
            if argument.macros and text == f"%{argument.macros[0]}":
                site = argument.where.read_at
            elif argument.macros:  # built through a macro that is not kept
                site = None
            comment = str(site) if site else str(argument.where)
            lines.append(_statement(f"{prefix}.{name}", text, comment))
        for name, default in self._unprintable.get(id(node), {}).items():
            # Addresses would make the text differ from one process to the next.
            shown = " ".join(re.sub(r" at 0x[0-9a-f]+", "", repr(default)).split())[:60]
            lines.append(f"# {prefix}.{name} = {shown}  # default, which gin cannot write")

    def _expression(self, node: Node, path: str) -> str:
        """Write one value; note the macros and objects that it needs."""
        if node.macros and not _builds(node):
            self._keep_macro(node, path)
            return f"%{node.macros[0]}"
        if isinstance(node, CallNode):
            if not node.calls and not node.arguments:
                return f"@{self._selector(node.target)}"
            scope = self._new_scope(path) if self._count[node.target] > 1 else ""
            self._write_object(node, path, scope)
            return f"@{scope}{self._selector(node.target)}{'()' if node.calls else ''}"
        if node.items is None:
            return repr(node.value)
        items = {key: self._expression(n, f"{path}[{key!r}]") for key, n in node.items.items()}
        if isinstance(node.value, dict):
            return "{" + ", ".join(f"{key!r}: {text}" for key, text in items.items()) + "}"
        inner = ", ".join(items.values())
        if isinstance(node.value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(items) == 1 else f"({inner})"

    def _keep_macro(self, node: Node, path: str) -> None:
        name, *rest = node.macros
        if name not in self._macros:
            text = self._expression(dataclasses.replace(node, macros=tuple(rest)), path)
            site = self._final[(), None, name].site
            self._macros[name] = _statement(name, text, str(site))

    def _new_scope(self, path: str) -> str:
        base = scope = re.sub(r"\W+", "_", path).strip("_")
        number = 2
        while scope in self._scopes:
            scope, number = f"{base}_{number}", number + 1
        self._scopes.add(scope)
        return f"{scope}/"

    def _selector(self, target: Any) -> str:
        module, attributes = self._sources[target]
        if module not in self._aliases:
            parts = module.split(".")
            taken = {*self._aliases.values(), "gin"}
            candidates = ["_".join(parts[-n:]) for n in range(1, len(parts) + 1)]
            candidates += [f"{parts[-1]}{n}" for n in range(2, len(taken) + 3)]
            self._aliases[module] = next(name for name in candidates if name not in taken)
        return f"{self._aliases[module]}.{attributes}"


def _builds(node: Node) -> bool:
    """Whether a value holds anything built, or bound, by a reference."""
    if isinstance(node, CallNode):
        return node.calls or bool(node.arguments)
    return any(_builds(item) for item in (node.items or {}).values())


def _statement(name: str, text: str, comment: str) -> str:
    comment = " ".join(comment.split())
    line = f"{name} = {text}"
    if len(line) > _WIDTH and text[0] in "[({":
        return f"# {comment}\n{name} = {_broken(text)}"
    return f"{line}  # {comment}"


def _broken(text: str) -> str:
    """Lay a container out with one item a line."""
    depth, quote, start, items = 0, "", 1, []
    for i, character in enumerate(text[:-1]):
        if quote:
            escaped = (i - len(text[:i].rstrip("\\"))) % 2 == 1
            quote = "" if character == quote and not escaped else quote
        elif character in "'\"":
            quote = character
        elif character in "[({":
            depth += 1
        elif character in "])}":
            depth -= 1
        elif character == "," and depth == 1:
            items.append(text[start:i].strip())
            start = i + 1
    items.append(text[start:-1].strip())
    return f"{text[0]}\n" + "".join(f"    {item},\n" for item in items if item) + text[-1]


def _import_line(module: str, alias: str) -> str:
    parent, _, name = module.rpartition(".")
    line = f"from {parent} import {name}" if parent else f"import {name}"
    return line if alias == name else f"{line} as {alias}"

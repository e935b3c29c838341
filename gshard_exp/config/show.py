"""Prints an assembled experiment: one line a setting, and a table of its parameters."""

from __future__ import annotations

import re
from typing import Any

from gshard_exp.config import signatures
from gshard_exp.config.assemble import Assembled, short_name
from gshard_exp.config.flatten import settings
from gshard_exp.config.operative import operative_config
from gshard_exp.config.provenance import Where
from gshard_exp.config.reading import Subject, placeholder_note

_WIDTH = 80


def show(subject: Subject, with_parameters: bool = False) -> str:
    """Write every setting of an experiment as `path = value  # file:line`.

    An object stands before its settings as `@module.Class()`. What nobody set says `# default`.

    Args:
        subject: the experiment.
        with_parameters: add the table of parameters, see `parameter_table`.
    """
    lines = [
        _line(path, value, subject.assembled)
        for path, value in settings(subject.assembled.tree).items()
    ]
    note = placeholder_note(subject.placeholders)
    parts = ["\n".join(lines)] + [f"# {note}"] * bool(note)
    if with_parameters:
        parts.append(parameter_table(subject.assembled.tree.model))
    return "\n\n".join(parts)


def written_as(subject: Subject, language: str) -> str:
    """Write an experiment as a gin file, or as Python code that returns its fiddle config.

    Either makes an equal tree. A placeholder is left for a run to choose.

    Args:
        subject: of gin files or of fiddle.
        language: `gin` or `fiddle`.
    """
    if language == "gin":
        return operative_config(subject.assembled, required=subject.open_places).rstrip()
    from gshard_exp.config.to_fiddle import fiddle_code

    return fiddle_code(subject.assembled, unset=subject.open_places).rstrip()


def drawn(subject: Subject) -> str:
    """Return the SVG of an experiment, see `graph`."""
    from gshard_exp.config.graph import graph

    return graph(subject)


def parameter_table(model: Any) -> str:
    """Tabulate the parameters of a model: path, shape by logical axis, total and active counts.

    Active is what one token uses, see `train.parameters`. No device is asked.
    """
    from gshard_exp.train.parameters import parameters, totals

    table = parameters(model)
    total, active = totals(table)
    wide = max(len("parameters"), len(f"{total:,}"))
    lines = [f"{'parameters':>{wide}}  {'active':>{wide}}"]
    for row in table:
        lines.append(f"{row.total:>{wide},}  {row.active:>{wide},}  {row.path}")
        shape = ", ".join(f"{name}={n}" for name, n in zip(row.names, row.shape, strict=True))
        indent = 2 * wide + 6
        lines.append(f"{'':{indent if indent + len(shape) <= _WIDTH else 8}}{shape}")
    lines.append(f"{total:>{wide},}  {active:>{wide},}  in all; active: what one token uses")
    return "\n".join(lines)


def value_text(value: Any) -> str:
    """Write a value as gin files do: `@module.Class()` for an object, `@module.name` for a name.

    A class stands for an object of it, as in `flatten.settings`.
    """
    if signatures.is_dataclass_type(value):
        return f"@{short_name(value)}()"
    if signatures.is_dataclass_type(type(value)):
        inner = [
            f"{name}={value_text(getattr(value, name))}"
            for name, default in _fields(type(value))
            if getattr(value, name) != default
        ]
        return f"@{short_name(type(value))}({', '.join(inner)})"
    if hasattr(value, "__qualname__") and hasattr(value, "__module__"):
        return f"@{short_name(value)}"
    # Addresses would make the text differ from one process to the next.
    return " ".join(re.sub(r" at 0x[0-9a-f]+", "", repr(value)).split())


def where_text(where: Where) -> str:
    """Name the statement that wrote a value: `file:line`, the flag, or `default`."""
    return str(where.site) if where.site else "default"


def _line(path: str, value: Any, assembled: Assembled[Any]) -> str:
    return f"{path} = {value_text(value)}  # {where_text(assembled.where(path))}"


def _fields(cls: type) -> list[tuple[str, Any]]:
    """List the parameters of a dataclass that are settings, with their defaults."""
    return [
        (name, signatures.default_of(cls, name))
        for name in signatures.parameters(cls)
        if not signatures.is_linens_own(cls, name)
    ]

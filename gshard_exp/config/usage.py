"""Finds settings that change nothing: the usual trace of a misspelt name.

The rules:

- A flag is a wish for this run: it must take effect, or it is an error.
- A macro in a file must be read by some statement of some file or flag, even by one that a later
  statement overrides (else a preset could not be overridden in part).
- Another binding in a file must belong to something that is built, or to something that only an
  overridden statement would have built (`MODEL = @moe.Model()` in a preset, `MODEL =
  @dense.Model()` after it: the preset's bindings for `moe.Model` are fine).
- Only the last of several statements that set the same thing is judged.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from gshard_exp.config.errors import ConfigError, nearest, one_of
from gshard_exp.config.parse import Program
from gshard_exp.config.values import Binding, Macro, Reference, iterate


def check(program: Program, consumed: Set[Any], in_force: Set[Any], macros_read: Set[str]) -> None:
    """Raise a ConfigError that lists every setting of the program that changes nothing.

    Args:
        program: all statements.
        consumed: keys of the bindings of everything that was built.
        in_force: those of them whose value was used, not hidden by one in a scope.
        macros_read: macros whose value was used.
    """
    final = program.final()
    mentioned = program.macros_mentioned()
    replaced = [binding for binding in program.bindings if final[binding.key] is not binding]
    excused = _reachable(program, replaced)
    unused = []
    for binding in final.values():
        if binding.target is None:
            used = binding.name in (macros_read if binding.site.is_flag else mentioned)
        elif binding.site.is_flag:
            used = binding.key in in_force
        else:
            used = binding.key in consumed or binding.target in excused
        if not used:
            unused.append(binding)
    if unused:
        raise _error(unused, program, mentioned, consumed)


def _reachable(program: Program, start: list[Binding]) -> set[Any]:
    """Return the classes and functions that the values of some statements lead to."""
    by_name: dict[Any, list[Binding]] = {}
    for binding in program.bindings:
        name = binding.name if binding.target is None else binding.target
        by_name.setdefault(name, []).append(binding)
    reached: set[Any] = set()
    waiting = list(start)
    while waiting:
        for item in iterate(waiting.pop().value):
            if isinstance(item, (Macro, Reference)):
                name = item.name if isinstance(item, Macro) else item.target
                if name not in reached:
                    reached.add(name)
                    waiting += by_name.get(name, [])
    return reached


def _error(
    unused: list[Binding], program: Program, mentioned: set[str], consumed: Set[Any]
) -> ConfigError:
    names = [binding.name for binding in unused]
    subject = f"{names[0]} is set, but" if len(names) == 1 else f"{', '.join(names)} are set, but"
    hints = [_hint(binding, program, mentioned, consumed) for binding in unused]
    return ConfigError(
        f"{subject} nothing reads it." if len(names) == 1 else f"{subject} nothing reads them.",
        rule="A setting that changes nothing is taken for a mistake.",
        at=[f"{b.site} ({b.name})" if len(unused) > 1 else str(b.site) for b in unused],
        hint="\n       ".join(dict.fromkeys(hints)),
    )


def _hint(binding: Binding, program: Program, mentioned: set[str], consumed: Set[Any]) -> str:
    if binding.target is None:
        if binding.name in mentioned:
            readers = [
                str(other.site)
                for other in program.bindings
                if any(item == Macro(binding.name) for item in iterate(other.value))
            ]
            return (
                f"without --gin.{binding.name}: its reader {one_of(readers)} is overridden, or "
                "belongs to what is not built"
            )
        close = one_of(nearest(binding.name, mentioned))
        return f"for {binding.name}: {close or f'no macro is read; remove {binding.name}'}"
    built = {key[1] for key in consumed}
    if binding.target in built:
        return f"{binding.name} without its scope, or with the scope of the reference"
    short = binding.selector
    known = {other.selector for other in program.bindings if other.target in built}
    close = one_of(nearest(short, known))
    return f"build it with @{short}() where it belongs" + (f", or set {close}" if close else "")

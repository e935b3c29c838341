"""Compares two experiments setting by setting, and in the size of their models."""

from __future__ import annotations

import dataclasses
from typing import Any

from gshard_exp.config.assemble import Assembled
from gshard_exp.config.flatten import settings
from gshard_exp.config.reading import Subject, placeholder_note
from gshard_exp.config.show import value_text, where_text
from gshard_exp.sharding.tables import columns


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of one of the two experiments, as text: its value and who set it."""

    value: str
    where: str

    def __str__(self) -> str:
        return f"{self.value}  # {self.where}"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A path at which two experiments differ; an experiment without that path has None."""

    path: str
    a: Setting | None
    b: Setting | None


def differences(a: Assembled[Any], b: Assembled[Any]) -> list[Difference]:
    """List the settings that differ in value, whoever set them; those of `a` come first.

    Of two objects of different classes the class differs, and what only one of them has.
    """
    in_a, in_b = settings(a.tree), settings(b.tree)
    found = []
    for path in dict.fromkeys((*in_a, *in_b)):
        one, other = _setting(a, in_a, path), _setting(b, in_b, path)
        if one is None or other is None or one.value != other.value:
            found.append(Difference(path, one, other))
        elif callable(in_a[path]) and in_a[path] is not in_b[path]:
            # Two modules may end in the same name: say all of it.
            one, other = (
                dataclasses.replace(setting, value=f"@{value.__module__}.{value.__qualname__}")
                for setting, value in ((one, in_a[path]), (other, in_b[path]))
            )
            found.append(Difference(path, one, other))
    return found


def diff(a: Subject, b: Subject) -> str:
    """Write the differences of two experiments, then those of their sizes and predicted cost."""
    lines = [f"A: {a.name}", f"B: {b.name}"]
    found = differences(a.assembled, b.assembled)
    for difference in found:
        lines += ["", difference.path]
        for side, setting in (("A", difference.a), ("B", difference.b)):
            lines.append(f"  {side} {setting or '(nothing here)'}")
    count = len(found) or "no"
    lines += ["", f"{count} setting{'s' * (count != 1)} differ{'s' * (count == 1)}", ""]
    lines += columns(_counts(a.assembled.tree, b.assembled.tree))
    note = placeholder_note(tuple(dict.fromkeys((*a.placeholders, *b.placeholders))))
    return "\n".join(lines + ["", note] * bool(note))


def _setting(assembled: Assembled[Any], found: dict[str, Any], path: str) -> Setting | None:
    if path not in found:
        return None
    return Setting(value_text(found[path]), where_text(assembled.where(path)))


def _counts(one: Any, other: Any) -> list[tuple[str, ...]]:
    from gshard_exp.train.record import sizes

    of_a, of_b = sizes(one), sizes(other)
    rows: list[tuple[str, ...]] = [("parameters", "A", "B", "B - A")]
    for name, key in (("total", "params_total"), ("active a token", "params_active")):
        rows.append((name, *_row(of_a[key], of_b[key])))
    tokens = [known["tokens_per_step"] for known in (of_a, of_b)]
    steps = [experiment.train_steps for experiment in (one, other)]
    rows += [
        ("tokens a step", *_row(*tokens)),
        ("steps", *_row(*steps)),
    ]
    flops = [known["flops_per_token"] for known in (of_a, of_b)]
    if None not in flops:
        whole = [f * t * s for f, t, s in zip(flops, tokens, steps, strict=True)]
        rows.append(("useful FLOPs a token", *_row(*map(round, flops))))
        of_whole = f"{whole[1] / whole[0]:.3g} x"
        rows.append(("useful FLOPs of the training", *(f"{w:.3g}" for w in whole), of_whole))
    return rows


def _row(a: int, b: int) -> tuple[str, ...]:
    return f"{a:,}", f"{b:,}", f"{b - a:+,}"

"""Draws an assembled experiment as an SVG: a box for each object, within the box that holds it.

Boxes within boxes need no layout program, and any class of one's own is drawn as ours are.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from gshard_exp.config import signatures
from gshard_exp.config.reading import Subject
from gshard_exp.config.show import value_text

# Pixels. The letters of a monospaced font are 0.6 of its size wide.
_SIZE, _LINE, _PAD = 12, 17, 10
_LETTER = 0.6 * _SIZE
_COLUMNS = 52  # letters in a line of text
_MANY = 4  # objects in a list from which on each is a line, not a box
_SHORT = 60  # letters in an object that is a line, not a box
_RATIO = 1.5  # width to height aimed at
_SHADES = {  # field of the experiment -> fill; what lies deeper is a little darker
    "model": (214, 228, 244),
    "data": (217, 236, 214),
    "evaluators": (217, 236, 214),
    "optimizer": (233, 220, 243),
}
_SPARSE, _REST = (252, 226, 196), (236, 236, 236)
_DARKER = 0.965


@dataclasses.dataclass
class _Box:
    """An object: what is written in it, and the boxes in it with their places."""

    title: str
    lines: list[str]
    shade: tuple[int, int, int]
    inner: list[_Box]
    x: float = 0.0  # within the box around it
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0


def graph(subject: Subject) -> str:
    """Return the SVG of an experiment.

    Each box names its class, what is not left at its default, and (in the model) the parameters
    below it: in all, and those that one token uses. Sparse layers have a colour of their own. An
    object that was drawn before is named by its path.
    """
    box = _Drawing(subject).root()
    _arrange(box)
    width, height = math.ceil(box.width + 2 * _PAD), math.ceil(box.height + 2 * _PAD)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="DejaVu Sans Mono, Menlo, Consolas, '
        f'monospace" font-size="{_SIZE}">'
    )
    ground = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, ground, *_svg(box, _PAD, _PAD), "</svg>"])


class _Drawing:
    """Makes boxes of the objects of a tree."""

    def __init__(self, subject: Subject) -> None:
        from gshard_exp.train.parameters import parameters

        self._name = subject.name
        self._tree = subject.assembled.tree
        self._parameters = parameters(self._tree.model)
        self._seen: list[tuple[Any, str]] = []

    def root(self) -> _Box:
        box = self._box(self._tree, "", type(self._tree).__name__, _REST)
        box.title = f"{type(self._tree).__name__}  {self._name}"
        return box

    def _box(self, value: Any, path: str, label: str, shade: tuple[int, int, int]) -> _Box:
        lines, inner = [], []
        count = self._count(path)
        if count:
            total, active = count
            lines.append(f"{total:,} parameters")
            if active != total:
                lines.append(f"{active:,} used by a token")
                shade = _SPARSE if hasattr(value, "num_experts") else shade
            if hasattr(value, "repeats"):
                lines.append(f"{value.repeats} x its pattern")
        darker = (round(shade[0] * _DARKER), round(shade[1] * _DARKER), round(shade[2] * _DARKER))
        for name, child in _settings(value):
            below = f"{path}.{name}" if path else name
            for where, item in _objects(child, below):
                known = self._known(item, where)
                if known or self._is_line(item, child, where):
                    text = f"as {known}" if known else _short(item)
                    lines += _wrapped(f"{where[len(path) :].lstrip('.')} = {text}")
                else:
                    here = where[len(path) :].lstrip(".")
                    inner.append(self._box(item, where, here, _SHADES.get(name, darker)))
            if not list(_objects(child, below)):
                lines += _value_lines(name, child)
        return _Box(f"{label}: {type(value).__name__}", lines, shade, inner)

    def _known(self, value: Any, path: str) -> str:
        """Return where an equal object of some size was drawn before; empty if none was."""
        if path.startswith("model") or not any(_has_objects(v) for _, v in _settings(value)):
            return ""
        for other, where in self._seen:
            if type(other) is type(value) and other == value:
                return where
        self._seen.append((value, path))
        return ""

    def _is_line(self, item: Any, among: Any, path: str) -> bool:
        plain = not any(_has_objects(value) for _, value in _settings(item))
        many = isinstance(among, (list, tuple)) and len(among) > _MANY
        short = len(value_text(item)) <= _SHORT
        return plain and (many or short) and not self._count(path)

    def _count(self, path: str) -> tuple[int, int] | None:
        """Sum the parameters below a path of the model, in all and active."""
        if path == "model":
            prefix = ""
        elif path.startswith("model.module"):
            below = path.removeprefix("model.module").lstrip(".")
            prefix = below.replace("[", "_").replace("]", "").replace(".", "/")
        else:
            return None
        rows = [
            row
            for row in self._parameters
            if not prefix or row.path == prefix or row.path.startswith(f"{prefix}/")
        ]
        return (sum(r.total for r in rows), sum(r.active for r in rows)) if rows else None


def _settings(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of an object that are no defaults, or hold objects."""
    for field in dataclasses.fields(value):
        if not field.init or signatures.is_linens_own(type(value), field.name):
            continue
        found = getattr(value, field.name)
        default = signatures.default_of(type(value), field.name)
        if default is inspect.Parameter.empty or _has_objects(found) or found != default:
            yield field.name, found


def _objects(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the dataclasses that a setting is, or holds, with their paths."""
    if signatures.is_dataclass_type(type(value)):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _objects(item, f"{path}[{index}]")


def _has_objects(value: Any) -> bool:
    return any(True for _ in _objects(value, ""))


def _value_lines(name: str, value: Any) -> list[str]:
    """Write a plain setting; of a table of pairs, who maps to what in a line each."""
    pairs = value if isinstance(value, (list, tuple)) else ()
    if len(pairs) > _MANY and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        grouped: dict[str, list[str]] = {}
        for key, entry in pairs:
            grouped.setdefault(value_text(entry), []).append(str(key))
        lines = [f"{name}:"]
        for entry, keys in grouped.items():
            lines += _wrapped(f"  {', '.join(keys)} -> {entry}")
        return lines
    if isinstance(value, Mapping):
        items = ", ".join(f"{key}: {value_text(item)}" for key, item in value.items())
        return _wrapped(f"{name} = {items}")
    return _wrapped(f"{name} = {value_text(value)}")


def _short(value: Any) -> str:
    """Write an object in a line, without its module."""
    return value_text(value).removeprefix(f"@{type(value).__module__.rsplit('.', 1)[-1]}.")


def _wrapped(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    return textwrap.wrap(text, _COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def _arrange(box: _Box) -> None:
    """Give a box its size, and the boxes in it their places: in rows, about as wide as wanted."""
    for inner in box.inner:
        _arrange(inner)
    text_width = _LETTER * max(len(line) for line in (box.title, *box.lines))
    top = 2 * _PAD + _LINE * (1 + len(box.lines))
    # Rows as wide as the first box, the first two, ...: the best of those.
    widest = max((inner.width for inner in box.inner), default=0.0)
    limits = [max(widest, width) for width in _running_widths(box.inner)]
    sizes = {limit: _place(box.inner, limit, top) for limit in limits}
    if sizes:
        best = min(sizes, key=lambda n: max(sizes[n][0], text_width, sizes[n][1] * _RATIO))
        width, height = _place(box.inner, best, top)
    else:
        width, height = 0.0, top
    box.width, box.height = max(width, text_width) + 2 * _PAD, height


def _running_widths(boxes: Sequence[_Box]) -> list[float]:
    return [
        sum(box.width for box in boxes[:count]) + (count - 1) * _PAD
        for count in range(1, len(boxes) + 1)
    ]


def _place(boxes: Sequence[_Box], limit: float, top: float) -> tuple[float, float]:
    """Place boxes in rows no wider than a limit; return the width and where the next could go."""
    x, y, row, right = 0.0, top, 0.0, 0.0
    for box in boxes:
        if x and x + box.width > limit:
            x, y, row = 0.0, y + row + _PAD, 0.0
        box.x, box.y = x + _PAD, y
        x, row, right = x + box.width + _PAD, max(row, box.height), max(right, x + box.width)
    return right, y + row + _PAD


def _svg(box: _Box, x: float, y: float) -> Sequence[str]:
    fill = "#{:02x}{:02x}{:02x}".format(*box.shade)
    parts = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="5" '
        f'fill={quoteattr(fill)} stroke="#666"/>',
        _text(box.title, x, y, ' font-weight="bold"'),
    ]
    for number, line in enumerate(box.lines, 1):
        parts.append(_text(line, x, y + number * _LINE, ""))
    for inner in box.inner:
        parts += _svg(inner, x + inner.x, y + inner.y)
    return parts


def _text(line: str, x: float, y: float, style: str) -> str:
    place = f'x="{x + _PAD:.1f}" y="{y + _PAD + _SIZE:.1f}"'
    return f'<text {place}{style} xml:space="preserve">{escape(line)}</text>'

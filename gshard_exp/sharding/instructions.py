"""Reads the text of a compiled program (XLA's HLO) into computations and their instructions."""

import dataclasses
import math
import re
from collections.abc import Mapping

_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "f8e4m3", "f8e3m4"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "c128": 16,
}
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# A fusion with one of these does more than to send.
_COMPUTES = ("convolution", "custom-call", "dot", "fusion", "while")
# Of a layout in braces only the memory space counts: `{1,0:T(8,128)S(1)}`.
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    r"|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's element type, dimensions, and the memory that it lies in.

    Attributes:
        dtype: `f32`, `bf16`, ...
        dims: its dimensions.
        space: 0 is the memory of the device (HBM); others, such as the vector memory of a TPU (1),
            are on the chip.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def bytes(self) -> int:
        """Size without padding; tokens and other types that hold no numbers count 0."""
        return _BYTES.get(self.dtype, 0) * math.prod(self.dims)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: unique in its computation.
        shapes: of the result; several if it is a tuple.
        opcode: `dot`, `fusion`, `all-to-all`, ...
        operands: names, in the same computation.
        text: of the operands in parentheses; what a `constant` or `parameter` is.
        attributes: the rest of the line.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    text: str
    attributes: str

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        found: list[str] = []
        for one, several in _CALLED.findall(self.attributes):
            found += [one] if one else [name.strip().lstrip("%") for name in several.split(",")]
        return tuple(name for name in found if name)

    @property
    def op_name(self) -> str:
        """Where JAX says it comes from: `jit(step)/.../dot_general`; empty if it does not."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1).replace("\\'", "'") if found else ""

    @property
    def target(self) -> str:
        """What a `custom-call` calls; empty for others."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


def read_computations(text: str) -> tuple[dict[str, tuple[Instruction, ...]], str]:
    """Read the text of a module.

    Returns:
        Instructions in order, by name of the computation; and the name of the one that runs first.

    Raises:
        ValueError: there is no entry computation in it.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name = "", ""
    lines: list[Instruction] = []
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? ?(?:->.*)?\{$", line)
        if header and " = " not in line:
            name, lines = header.group(2), []
            entry = name if header.group(1) else entry
        elif line.startswith("}"):
            computations[name] = tuple(lines)
            name = ""
        elif name and " = " in line:
            lines.append(_instruction(line.strip()))
    if entry not in computations:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
    plain = {
        name: tuple(_unwrapped(line, computations) for line in lines)
        for name, lines in computations.items()
    }
    return plain, entry


def _unwrapped(
    line: Instruction, computations: Mapping[str, tuple[Instruction, ...]]
) -> Instruction:
    """Return a fusion that only sends as the collective that it is.

    The TPU compiler fuses an all-reduce with the slice that each device keeps of the sum, which
    makes a reduce-scatter of it.
    """
    if line.opcode != "fusion":
        return line
    body = computations.get(line.called[0], ())
    sends = [inner for inner in body if inner.opcode in COLLECTIVES]
    if len(sends) != 1 or any(inner.opcode in _COMPUTES for inner in body):
        return line
    (sent,) = sends
    kept, summed = (sum(shape.bytes for shape in one.shapes) for one in (line, sent))
    scatters = sent.opcode == "all-reduce" and kept < summed
    attributes = re.sub(r"\bkind=\w+, calls=%?[\w.\-]+", "", line.attributes)
    return dataclasses.replace(
        line,
        opcode="reduce-scatter" if scatters else sent.opcode,
        attributes=attributes + sent.attributes,
    )


def _instruction(line: str) -> Instruction:
    left, rest = line.removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opening = rest.index("(", end)
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    return Instruction(
        name=left.lstrip("%"),
        shapes=_shapes(rest[:end]),
        opcode=rest[end:opening].strip(),
        operands=tuple(_NAME.findall(inside)),
        text=inside,
        attributes=rest[closing + 1 :],
    )


def _closing(text: str, opening: int) -> int:
    """Return the index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"no parenthesis closes the one at {opening} of {text!r}")


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(
            dtype, tuple(int(d.strip("<= ")) for d in dims.split(",") if d.strip()), int(space or 0)
        )
        for dtype, dims, space in _ARRAY.findall(text)
    )

"""Reads a compiled program (XLA's HLO text): what it executes, and how often.

XLA's own cost analysis counts the body of a loop once; here each instruction comes with the number
of times that it runs, loops within loops multiplied. Nothing is compiled or run, so the text may be
of any platform's program. All sizes are those of one device: a partitioned program is the program
of each.

    module = parse(compiled.as_text())
    module.flops()            # of products and convolutions
    module.collectives()      # what is sent between devices
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from gshard_exp.sharding.groups import Groups, read_groups

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
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    r"|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's element type and dimensions."""

    dtype: str
    dims: tuple[int, ...]

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
        return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True)
class Execution:
    """An instruction, the shapes of its operands, and how often a program runs it."""

    instruction: Instruction
    operands: tuple[tuple[Shape, ...], ...]
    times: int

    def flops(self) -> int:
        """Return the operations of one product or convolution, times `times`; else 0."""
        return self.times * _flops(self.instruction, self.operands)


@dataclasses.dataclass(frozen=True)
class Collective:
    """What one instruction sends between devices.

    Attributes:
        kind: one of `COLLECTIVES`; the asynchronous forms count as these.
        bytes: of one execution on one device: of operands or of results, whichever are more (an
            all-gather's result, a reduce-scatter's operand).
        times: executions.
        groups: devices that exchange with one another, by position in the program's order; empty
            if the text does not say (all of them).
        shapes: of the results on one device; without the operands that an asynchronous form
            returns beside them.
        op_name: where it comes from.
    """

    kind: str
    bytes: int
    times: int
    groups: Groups
    shapes: tuple[Shape, ...]
    op_name: str

    @property
    def group(self) -> int:
        """Number of devices in a group; 0 if the text does not say."""
        return max(map(len, self.groups), default=0)


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed program.

    Attributes:
        computations: instructions in order, by name of the computation.
        entry: the one that runs first.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str

    def executions(self) -> Iterator[Execution]:
        """Yield every instruction that runs, inside called computations too.

        Of a conditional every branch is yielded: an upper bound. A loop whose number of trips
        cannot be told counts once, see `unknown_loops`.
        """
        yield from self._walk(self.entry, 1)

    def flops(self) -> int:
        """Return the operations of all products and convolutions, 2 for each multiply-add."""
        return sum(execution.flops() for execution in self.executions())

    def collectives(self) -> list[Collective]:
        """List what is sent between devices."""
        found = map(collective, self.executions())
        return [sent for sent in found if sent is not None]

    def unknown_loops(self) -> list[str]:
        """Name the loops that are counted once because their number of trips is not known."""
        loops = (run.instruction for run in self.executions() if run.instruction.opcode == "while")
        return [loop.name for loop in loops if self.trip_count(loop) is None]

    def custom_calls(self) -> dict[str, int]:
        """Count executions of each custom call, by target; their work is not in `flops`.

        Except for cuBLAS products, which are.
        """
        counts: dict[str, int] = {}
        for run in self.executions():
            if run.instruction.opcode == "custom-call":
                target = _target(run.instruction)
                counts[target] = counts.get(target, 0) + run.times
        return counts

    def trip_count(self, loop: Instruction) -> int | None:
        """Return how often a `while` runs its body.

        Taken from XLA's annotation, or else from the condition: loops that JAX makes for `scan`
        count from 0 by 1 to the only constant of their condition.
        """
        known = re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', loop.attributes)
        if known:
            return int(known.group(1))
        condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
        lines = self.computations[condition.group(1)] if condition else ()
        constants = [int(i.text) for i in lines if i.opcode == "constant" and i.text.isdigit()]
        compares = [i for i in self._below(lines) if i.opcode == "compare"]
        counts_up = len(compares) == 1 and "direction=LT" in compares[0].attributes
        return constants[0] if counts_up and len(constants) == 1 else None

    def _below(self, lines: tuple[Instruction, ...]) -> Iterator[Instruction]:
        for instruction in lines:
            yield instruction
            for name in instruction.called:
                yield from self._below(self.computations[name])

    def _walk(self, computation: str, times: int) -> Iterator[Execution]:
        lines = self.computations[computation]
        shapes = {line.name: line.shapes for line in lines}
        for line in lines:
            yield Execution(line, tuple(shapes.get(name, ()) for name in line.operands), times)
            trips = (self.trip_count(line) or 1) if line.opcode == "while" else 1
            # Some versions print what an asynchronous start runs at its end too.
            called = () if line.opcode in ("async-update", "async-done") else line.called
            for name in called:
                yield from self._walk(name, times * trips)


def parse(text: str) -> Module:
    """Read the text of an HLO module, `jax.stages.Compiled.as_text()`.

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
    return Module(computations, entry)


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
    # Layouts stand in braces; tiles and memory spaces in them look like nothing that is matched.
    return tuple(
        Shape(dtype, tuple(int(d.strip("<= ")) for d in dims.split(",") if d.strip()))
        for dtype, dims in _ARRAY.findall(text)
    )


def _integers(attributes: str, key: str) -> tuple[int, ...]:
    found = re.search(rf"\b{key}=\{{([\d,]*)\}}", attributes)
    return tuple(map(int, found.group(1).split(","))) if found and found.group(1) else ()


def _flops(instruction: Instruction, operands: tuple[tuple[Shape, ...], ...]) -> int:
    attributes = instruction.attributes
    if instruction.opcode in ("dot", "ragged-dot"):
        summed = _integers(attributes, "lhs_contracting_dims")
    elif instruction.opcode == "custom-call" and "gemm" in _target(instruction):
        listed = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', attributes)
        summed = tuple(int(d.strip('"')) for d in listed.group(1).split(",")) if listed else ()
    elif instruction.opcode == "convolution":
        return _convolution_flops(instruction, operands[0][0], operands[1][0])
    else:
        return 0
    left = operands[0][0].dims
    return 2 * math.prod(instruction.shapes[0].dims) * math.prod(left[d] for d in summed)


def _convolution_flops(instruction: Instruction, image: Shape, kernel: Shape) -> int:
    """Count the multiply-adds that meet no padding and no hole, as XLA's cost analysis does.

    On TPU products are convolutions, and batch dimensions of a product windows over padding, of
    which most is never multiplied.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        raise ValueError(f"{instruction.name}: a convolution without dim_labels")
    of_image, of_kernel, of_result = labels.groups()
    result = instruction.shapes[0].dims
    window = _window(instruction.attributes)
    spatial = sorted(label for label in of_result if label.isdigit())
    pairs = 1
    for index, label in enumerate(spatial):
        pairs *= _meetings(
            size=image.dims[of_image.index(label)],
            kernel=kernel.dims[of_kernel.index(label)],
            results=result[of_result.index(label)],
            window={key: values[index] for key, values in window.items()},
        )
    rows = result[of_result.index("b")]
    features = result[of_result.index("f")]
    return 2 * rows * features * kernel.dims[of_kernel.index("i")] * pairs


def _window(attributes: str) -> dict[str, tuple[int, ...]]:
    """Read `window={size=3x3 stride=2x2 pad=0_1x0_1 ...}`: numbers by dimension."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in found.group(1).split()) if found else {}
    return {
        key: tuple(int(part.split("_")[0]) for part in fields[key].split("x"))
        for key in ("stride", "pad", "lhs_dilate", "rhs_dilate")
        if key in fields
    }


def _meetings(size: int, kernel: int, results: int, window: Mapping[str, int]) -> int:
    """Count the (result, kernel) positions along one dimension that meet an element."""
    stride, hole = window.get("stride", 1), window.get("lhs_dilate", 1)
    step, pad = window.get("rhs_dilate", 1), window.get("pad", 0)
    last = (size - 1) * hole
    return sum(
        0 <= position <= last and position % hole == 0
        for result in range(results)
        for position in (result * stride + k * step - pad for k in range(kernel))
    )


def _target(instruction: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return found.group(1) if found else ""


def collective(execution: Execution) -> Collective | None:
    """Read what an instruction sends between devices; None if it sends nothing."""
    instruction = execution.instruction
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    operands = [shape for operand in execution.operands for shape in operand]
    results = list(instruction.shapes)
    if instruction.opcode.endswith("-start") and len(results) > len(operands):
        # What an asynchronous start returns: its operands, then its results, then at times
        # scalars that say where it stands.
        results = results[len(operands) : 2 * len(operands)]
    sent, received = (sum(shape.bytes for shape in side) for side in (operands, results))
    return Collective(
        kind,
        max(sent, received),
        execution.times,
        read_groups(instruction.attributes),
        tuple(results),
        instruction.op_name,
    )

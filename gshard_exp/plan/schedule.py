"""What a compiled module runs, in order, and what each instruction moves and takes.

`sharding.hlo` counts inside fusions too, where the products are; here a fusion is one instruction,
which reads its operands and writes its results once.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

from gshard_exp.sharding.hlo import Collective, Execution, Module, collective
from gshard_exp.sharding.instructions import Instruction, Shape
from gshard_exp.sharding.products import Product

# These move nothing: names for what is already there.
FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "call"),
    *("conditional", "after-all", "partition-id", "opt-barrier", "async-start"),
}
# So are these, by their target.
_FREE_CALLS = {"AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast"}
# Their time is that of what they run; an asynchronous start runs the computation that it wraps.
_CALLS = ("while", "call", "conditional", "async-start")
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Work:
    """One instruction and how often a step runs it.

    Attributes:
        instruction: a fusion counts as one.
        sends: what it sends between devices; None if nothing.
        times: executions in a step.
        op_name: where JAX says it comes from; of an instruction that the compiler added, that of
            the one whose result it takes, or else of the one that takes its result.
        cycles: of one execution, by the TPU compiler's own estimate; None if it has none.
        bytes: read from and written to the device's memory in one execution; what lies on the chip
            already does not count.
        products: of one execution.
    """

    instruction: Instruction
    sends: Collective | None
    times: int
    op_name: str
    cycles: int | None
    bytes: int
    products: tuple[Product, ...]

    @property
    def flops(self) -> int:
        """Return the operations of the products in one execution."""
        return sum(product.flops for product in self.products)

    def padding(self, unit: int) -> int:
        """Return what a matrix unit of that width multiplies beside them, see `Product.padded`."""
        return sum(product.padded(unit) - product.flops for product in self.products)


def schedule(module: Module) -> Iterator[Work]:
    """Yield every instruction that a step runs, loops' bodies with their number of trips."""
    yield from _walk(module, module.entry, 1, "")


def largest_buffers(module: Module, count: int) -> list[tuple[int, str, str]]:
    """List what is largest of what a step is given and makes: bytes, shape, where it comes from.

    What it is given is named `state.params[...]`, `state.opt_state...` or `batch[...]`.
    """
    found: dict[tuple[str, str], int] = {}
    given = (line for line in module.computations[module.entry] if line.opcode == "parameter")
    made = ((work.instruction, work.op_name) for work in schedule(module))
    for line, origin in (*((line, line.op_name) for line in given), *made):
        for shape in line.shapes:
            text = f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
            found[text, origin] = shape.bytes
    return sorted(((size, *key) for key, size in found.items()), reverse=True)[:count]


def _walk(module: Module, computation: str, times: int, caller: str) -> Iterator[Work]:
    """Yield what a computation runs; what has no name in it comes from where its caller does."""
    lines = module.computations[computation]
    shapes = {line.name: line.shapes for line in lines}
    names = {name: known or caller for name, known in _op_names(lines).items()}
    for line in lines:
        if line.opcode in _CALLS:
            trips = (module.trip_count(line) or 1) if line.opcode == "while" else 1
            for name in line.called:
                yield from _walk(module, name, times * trips, names[line.name])
        if line.opcode not in FREE and line.target not in _FREE_CALLS:
            operands = tuple(shapes.get(name, ()) for name in line.operands)
            yield Work(
                instruction=line,
                sends=collective(Execution(line, operands, times)),
                times=times,
                op_name=names[line.name],
                cycles=_cycles(line),
                bytes=_bytes(module, line, operands),
                products=_products(module, line, operands),
            )


def _op_names(lines: tuple[Instruction, ...]) -> Mapping[str, str]:
    """Map each instruction to where it comes from, also those that have no name of JAX's."""
    names = {line.name: line.op_name if line.op_name.startswith("jit(") else "" for line in lines}
    for line in lines:
        if not names[line.name]:
            names[line.name] = next(filter(None, (names.get(o, "") for o in line.operands)), "")
    for line in reversed(lines):
        for operand in line.operands:
            if names.get(operand) == "":
                names[operand] = names[line.name]
    return names


def _cycles(line: Instruction) -> int | None:
    found = re.search(r'"estimated_cycles":"(\d+)"', line.attributes)
    return int(found.group(1)) if found else None


def _products(
    module: Module, line: Instruction, operands: tuple[tuple[Shape, ...], ...]
) -> tuple[Product, ...]:
    runs: Iterable[Execution] = (Execution(line, operands, 1),)
    if line.opcode == "fusion":  # it may call fusions: all that runs within
        bodies = (Module(module.computations, name) for name in line.called)
        runs = (run for body in bodies for run in body.executions())
    return tuple(product for product in (run.product() for run in runs) if product)


def _bytes(module: Module, line: Instruction, operands: tuple[tuple[Shape, ...], ...]) -> int:
    """Count what is read and written; of an array that is only sliced or updated, that part."""
    written = _size(line.shapes)
    read = [_size(operand) for operand in operands]
    if line.opcode in _SLICES:
        return written + _part(line.shapes, operands[0])
    if line.opcode == "copy-start":  # its result names the source again
        return _size(line.shapes[:1]) + sum(read)
    if line.opcode == "dynamic-update-slice":
        return read[1] + _part(operands[1], operands[0])
    if line.opcode != "fusion":
        return written + sum(read)
    body = module.computations[line.called[0]]
    users: dict[str, list[Instruction]] = {}
    for inner in body:
        for operand in set(inner.operands):
            users.setdefault(operand, []).append(inner)
    shapes = {inner.name: inner.shapes for inner in body}
    for inner in body:
        if inner.opcode != "parameter" or not inner.text.isdigit():
            continue
        index, takers = int(inner.text), users.get(inner.name, [])
        if not takers or any(taker.operands[0] != inner.name for taker in takers):
            continue
        if all(taker.opcode in _SLICES for taker in takers):
            read[index] = sum(_part(taker.shapes, operands[index]) for taker in takers)
        elif [taker.opcode for taker in takers] == ["dynamic-update-slice"]:
            # Updated in place: the rest is neither read nor written.
            update = _part(shapes.get(takers[0].operands[1], ()), operands[index])
            written -= max(0, read[index] - update)
            read[index] = 0
    return max(0, written) + sum(read)


def _size(shapes: Iterable[Shape]) -> int:
    """Add up what lies in the device's memory."""
    return sum(shape.bytes for shape in shapes if shape.space == 0)


def _part(part: Iterable[Shape], whole: Iterable[Shape]) -> int:
    """Return the size of a part of an array, in whose memory it lies."""
    in_memory = all(shape.space == 0 for shape in whole)
    return sum(shape.bytes for shape in part) if in_memory else 0

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
import re
from collections.abc import Iterator, Mapping

from gshard_exp.sharding import products
from gshard_exp.sharding.groups import Groups, read_groups
from gshard_exp.sharding.instructions import COLLECTIVES, Instruction, Shape, read_computations
from gshard_exp.sharding.products import Product


@dataclasses.dataclass(frozen=True)
class Execution:
    """An instruction, the shapes of its operands, and how often a program runs it."""

    instruction: Instruction
    operands: tuple[tuple[Shape, ...], ...]
    times: int

    def product(self) -> Product | None:
        """Return what one execution multiplies; None if it is no product."""
        return products.read(self.instruction, self.operands)


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
        found = ((run.times, run.product()) for run in self.executions())
        return sum(times * product.flops for times, product in found if product)

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
                target = run.instruction.target
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
    return Module(*read_computations(text))


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

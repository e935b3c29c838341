"""Predicts how long a compiled step takes on a TPU, part by part.

    step = sum over instructions of  times * max(cycles / clock, products / peak)
         + sum over collectives of   times * plan.collectives.seconds

`cycles` are the TPU compiler's own estimate for each fusion, in the module's text. They count
memory traffic too: a large element-wise operation moves 450 bytes a cycle, 423 GB/s at the 940 MHz
of v3, whose published bandwidth is 450 GB/s a core. Instructions without an estimate (copies
between layouts, scatters) take bytes / bandwidth. Nothing overlaps, not even what v4 and later copy
into vector memory ahead of its use, and all cores take the same time.

What can be checked against the paper: the forward pass of a layer (Figure 8), its share of
recomputation (Figure 7) and steps a second (Table 3); `experiments/paper_tables` does.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from gshard_exp import axes
from gshard_exp.plan import collectives, parts
from gshard_exp.plan.schedule import Work, schedule
from gshard_exp.plan.topology import Chip, Topology
from gshard_exp.sharding.causes import FORWARD, RECOMPUTE
from gshard_exp.sharding.groups import mesh_axes
from gshard_exp.sharding.hlo import Collective, Module

# Opcodes of asynchronous collectives and copies; the time is that of the start.
_DONE = ("-done", "-update")
SECONDS_A_YEAR = 365.25 * 24 * 3600
N = TypeVar("N", int, float)


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
    """Collectives of one kind, size and cause.

    Attributes:
        kind: `all-to-all`, ...
        count: executions in a step.
        bytes: of one execution on one core.
        seconds: of all executions; None on CPU.
        group: cores that exchange with one another.
        axes: mesh axes over which they do, see `sharding.groups.mesh_axes`.
        cause: part of the model and pass.
    """

    kind: str
    count: int
    bytes: int
    seconds: float | None
    group: int
    axes: str
    cause: str


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step takes on one core.

    Attributes:
        flops: of products by part and pass, loops multiplied.
        padding_flops: what the matrix units multiply beside them, where a product does not fill
            them, see `Product.padded`; 0 on CPU.
        bytes_moved: read from and written to memory.
        collectives: by kind, size and cause, the longest first.
        breakdown: seconds by part and pass; empty on CPU.
        encoder_forward: seconds of the encoder's forward pass by part: Figure 8 times one pair of
            encoder layers.
        roofline_seconds: had every instruction run at peak or at full bandwidth, and every
            collective as modelled; None on CPU.
        unknown_loops: loops that count once since their trips are not known.
    """

    flops: Mapping[str, Mapping[str, int]]
    padding_flops: int
    bytes_moved: int
    collectives: tuple[CollectiveCost, ...]
    breakdown: Mapping[str, Mapping[str, float]]
    encoder_forward: Mapping[str, float]
    roofline_seconds: float | None
    unknown_loops: tuple[str, ...]

    @property
    def executed_flops(self) -> int:
        """Operations of all products."""
        return sum(sum(passes.values()) for passes in self.flops.values())

    @property
    def recomputed_flops(self) -> int:
        """Of these, in recomputation."""
        return sum(passes.get(RECOMPUTE, 0) for passes in self.flops.values())

    @property
    def step_seconds(self) -> float | None:
        """Predicted time of a step; None on CPU."""
        total = sum(sum(passes.values()) for passes in self.breakdown.values())
        return total or None


def estimate(
    module: Module, topology: Topology, *, sparse: frozenset[str], mesh: Mapping[str, int]
) -> Cost:
    """Walk a module and add up.

    Args:
        module: the compiled step.
        topology: the machine that it was compiled for.
        sparse: see `parts.sparse_blocks`.
        mesh: size of each mesh axis, in the order of the mesh.
    """
    breakdown: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    flops: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    encoder: dict[str, float] = defaultdict(float)
    found: dict[tuple, int] = defaultdict(int)
    padding = moved = 0
    roofline = 0.0
    for work in schedule(module):
        if work.instruction.opcode.endswith(_DONE):
            continue
        sent = work.sends
        phase = parts.phase(work.op_name)
        if sent is not None:
            over = mesh_axes(sent.groups, mesh)
            part = parts.part(work.op_name, sparse, sums_gradients=_sums_gradients(sent, over))
            group = sent.group or topology.cores
            spent = ideal = collectives.seconds(sent.kind, sent.bytes, group, topology)
            cause = f"{part}, {phase}"
            found[sent.kind, sent.bytes, spent, group, " x ".join(over), cause] += work.times
        else:
            part = parts.part(work.op_name, sparse)
            if work.products:
                flops[part][phase] += work.times * work.flops
                padding += work.times * work.padding(topology.chip.unit) if topology.chip else 0
            moved += work.times * work.bytes
            spent, ideal = _seconds(work, topology.chip)
        if spent is not None and ideal is not None:
            breakdown[part][phase] += work.times * spent
            if phase == FORWARD and "/encoder/" in work.op_name:
                encoder[part] += work.times * spent
            roofline += work.times * ideal
    rows = [_collective(key, count) for key, count in found.items()]
    return Cost(
        flops=_plain(flops),
        padding_flops=padding,
        bytes_moved=moved,
        collectives=tuple(sorted(rows, key=lambda row: -(row.seconds or row.bytes * row.count))),
        breakdown=_plain(breakdown),
        encoder_forward=dict(encoder),
        roofline_seconds=roofline or None,
        unknown_loops=tuple(module.unknown_loops()),
    )


def _plain(nested: Mapping[str, dict[str, N]]) -> dict[str, dict[str, N]]:
    return {name: dict(passes) for name, passes in nested.items()}


def _sums_gradients(sent: Collective, over: Sequence[str]) -> bool:
    """Tell whether rows of the batch are added up; over `model` it is hidden widths or heads."""
    sums = sent.kind in ("all-reduce", "reduce-scatter")
    return sums and not any(axis.startswith(axes.MODEL) for axis in over)


def _seconds(work: Work, chip: Chip | None) -> tuple[float, float] | tuple[None, None]:
    """Return the predicted time of one execution and that at peak; None on CPU."""
    if chip is None:
        return None, None
    products = work.flops * chip.devices / chip.peak_flops
    traffic = work.bytes * chip.devices / chip.hbm_bandwidth
    if work.cycles is None:
        spent = max(products, traffic)
    else:
        spent = max(products, work.cycles / chip.clock)
    return spent, min(spent, max(products, traffic))


def _collective(key: tuple, count: int) -> CollectiveCost:
    kind, size, each, group, over, cause = key
    return CollectiveCost(
        kind=kind,
        count=count,
        bytes=size,
        seconds=None if each is None else count * each,
        group=group,
        axes=over,
        cause=cause,
    )

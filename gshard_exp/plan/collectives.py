"""How long collectives take on a torus of TPU chips.

TPU v3: the times of Figure 9 of the paper, which measured all-to-all and all-reduce of 8 and 32 MB
a core at 16 to 2048 cores. Between numbers of cores they are interpolated in logarithms, between
sizes linearly; below 8 MB and above 32 MB they are in proportion to the size. Groups of fewer than
16 cores take the time of 16.

Other generations: link bandwidth and the shape of the torus.

    all-to-all   d * k / (4 * l * b)   d: bytes of a chip, its cores together; k: chips along the
                                       slowest axis. Half of all bytes cross its middle, over l
                                       links for each row of chips: 2 of a ring, 1 of a line.
    all-reduce   2 * s / (L * b)       s: bytes of a core, reduced and gathered; L: the sum of l
                                       over the axes.

On all of them:

    all-gather, reduce-scatter, broadcast   half an all-reduce
    permute                                 s / b
    any other kind                          an all-to-all

b is the published bandwidth of a link in one direction times `LINK_SHARE`. With 0.4 the formulas
give three of Figure 9's four times at 2048 cores of v3 within 10 % (all-to-all of 8 MB 2.40 ms for
2.36 ms, of 32 MB 9.59 ms for 10.63 ms; all-reduce of 32 MB 0.60 ms for 0.61 ms) and the fourth, an
all-reduce of 8 MB, 29 % too short (0.15 ms for 0.21 ms): it takes time that does not depend on its
size. That other generations reach the same share of their links is an assumption. So are: nothing
overlaps with computation (true of the paper's breakdown, pessimistic for later compilers); a group
smaller than the machine is a compact block, of as many axes as its chips can double along; an axis
is a ring if it is as long as the machine's and that is one (`Chip.ring`); nothing is faster than
`LATENCY`.
"""

import math
from collections.abc import Mapping

from gshard_exp.plan.topology import Chip, Topology
from gshard_exp.sharding import figure9

MIB = 2**20
LINK_SHARE = 0.4
LATENCY = 20e-6  # seconds that no collective is faster than

# What a kind is a share of; others are an all-to-all.
_SHARES = {
    "all-reduce": ("all-reduce", 1.0),
    **dict.fromkeys(("all-gather", "reduce-scatter", "collective-broadcast"), ("all-reduce", 0.5)),
}


def seconds(kind: str, size: int, group: int, topology: Topology) -> float | None:
    """Return how long one collective takes.

    Args:
        kind: of `sharding.hlo.COLLECTIVES`.
        size: bytes of a core: operands or results, whichever are more.
        group: cores that exchange with one another; 0 for all.
        topology: the machine.

    Returns:
        None on CPU.
    """
    chip = topology.chip
    if chip is None:
        return None
    cores = group or topology.cores
    if cores == 1:
        return 0.0
    if kind == "collective-permute":
        return max(LATENCY, size / (LINK_SHARE * chip.link_bandwidth))
    known, share = _SHARES.get(kind, ("all-to-all", 1.0))
    measured = topology.name.startswith("v3:")
    whole = _figure_9(known, size, cores) if measured else _torus(known, size, cores, topology)
    return max(LATENCY, share * whole)


def _figure_9(kind: str, size: int, cores: int) -> float:
    """Interpolate the published times; beyond 2048 cores an all-to-all grows with their root."""
    known = figure9.published()
    few, many = 8 * MIB, 32 * MIB
    small, large = (_at(cores, known[kind, bytes_]) for bytes_ in (few, many))
    if size <= few:
        spent = small * size / few
    elif size >= many:
        spent = large * size / many
    else:
        spent = small + (large - small) * (size - few) / (many - few)
    beyond = max(1.0, cores / figure9.PARTITIONS[-1]) ** 0.5 if kind == "all-to-all" else 1.0
    return spent * beyond


def _at(cores: int, times: Mapping[int, float]) -> float:
    """Interpolate between numbers of cores, both in logarithms; beyond them the last one."""
    if cores in times or not min(times) < cores < max(times):
        return times[min(max(cores, min(times)), max(times))]
    below = max(known for known in times if known < cores)
    part = math.log2(cores / below)  # the next is twice as many
    return times[below] ** (1 - part) * times[2 * below] ** part


def _torus(kind: str, size: int, cores: int, topology: Topology) -> float:
    chip = topology.chip
    assert isinstance(chip, Chip)
    axes = sorted((n for n in topology.shape if n > 1), reverse=True) or [1]
    chips = max(1, cores // chip.devices)
    if cores < topology.cores:
        doublings = max(1, int(math.log2(chips)))
        axes = axes[:doublings]
        axes = [min(axes[0], max(2, round(chips ** (1 / len(axes)))))] * len(axes)
    links = [2 if n in topology.shape and n % chip.ring == 0 else 1 for n in axes]
    bandwidth = LINK_SHARE * chip.link_bandwidth
    if kind == "all-to-all":
        slowest = max(n / count for n, count in zip(axes, links, strict=True))
        return size * min(chip.devices, cores) * slowest / (4 * bandwidth)
    return 2 * size / (sum(links) * bandwidth)

"""Measures the partitioner's four communication primitives on the devices at hand.

Source: section 3.3 for the primitives, Figure 9 for what is measured: time against the number of
partitions, at a fixed size for each partition.
"""

import dataclasses
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from gshard_exp.errors import SettingError

_AXIS = "partition"
_UNITS = {"KB": 2**10, "MB": 2**20, "GB": 2**30}


def _all_reduce(x: Float[Array, " n"], partitions: int) -> Float[Array, " n"]:
    return jax.lax.psum(x, _AXIS)


def _all_gather(x: Float[Array, " n"], partitions: int) -> Float[Array, " n"]:
    own = jax.lax.slice(x, (0,), (x.shape[0] // partitions,))
    return jax.lax.all_gather(own, _AXIS, tiled=True)


def _all_to_all(x: Float[Array, " n"], partitions: int) -> Float[Array, " n"]:
    return jax.lax.all_to_all(x, _AXIS, split_axis=0, concat_axis=0, tiled=True)


def _collective_permute(x: Float[Array, " n"], partitions: int) -> Float[Array, " n"]:
    ring = [(i, (i + 1) % partitions) for i in range(partitions)]
    return jax.lax.ppermute(x, _AXIS, ring)


@dataclasses.dataclass(frozen=True)
class Primitive:
    """A way of exchanging data.

    Attributes:
        function: on one partition, of its float32 numbers and the number of partitions.
        sent: share of the size that each partition has to send, given the number of partitions.
    """

    function: Callable[[Float[Array, " n"], int], Float[Array, " n"]]
    sent: Callable[[int], float]


# What is sent is the least that will do (on a ring): NVIDIA/nccl-tests, doc/PERFORMANCE.md.
PRIMITIVES: Mapping[str, Primitive] = {
    "all-reduce": Primitive(_all_reduce, lambda d: 2 * (d - 1) / d),
    "all-gather": Primitive(_all_gather, lambda d: (d - 1) / d),
    "all-to-all": Primitive(_all_to_all, lambda d: (d - 1) / d),
    "collective-permute": Primitive(_collective_permute, lambda d: 1.0),
}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Times of one primitive.

    Attributes:
        primitive: one of `PRIMITIVES`.
        size: bytes that one partition has before; of an all-gather, bytes that it has afterwards.
        partitions: devices that take part.
        seconds: of each run, from the host's call until every device is done.
    """

    primitive: str
    size: int
    partitions: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Seconds that a quarter, and three quarters, of the runs stay below."""
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(low), float(high)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median."""
        low, high = self.quartiles
        return (high - low) / 2 / self.median

    @property
    def bytes_per_second(self) -> float:
        """Bytes that one partition has to send, per second."""
        return PRIMITIVES[self.primitive].sent(self.partitions) * self.size / self.median

    def as_json(self) -> dict[str, Any]:
        """Return plain numbers, seconds of each run included."""
        return dataclasses.asdict(self) | {
            "median_s": self.median,
            "spread": self.spread,
            "bytes_per_second": self.bytes_per_second,
        }


def parse_size(text: str) -> int:
    """Read `8MB` as 8 * 2^20 bytes; KB and GB likewise.

    Raises:
        SettingError: it is no whole number of one of these.
    """
    found = re.fullmatch(r"(\d+) ?(KB|MB|GB)", text.strip().upper())
    if found is None or int(found.group(1)) == 0:
        raise SettingError(
            f"the size {text!r} is no whole number of KB, MB or GB.",
            ("sizes",),
            hint="Write it as 512KB or 8MB, several with commas.",
        )
    return int(found.group(1)) * _UNITS[found.group(2)]


def partition_counts(devices: int) -> list[int]:
    """Return 2, 4, 8, ... up to the number of devices, and that number."""
    powers = [2**n for n in range(1, devices.bit_length()) if 2**n <= devices]
    return sorted({*powers, devices})


def measure(
    devices: Sequence[jax.Device], sizes: Sequence[int], *, runs: int = 20
) -> list[Measurement]:
    """Time every primitive at every size on 2, 4, 8, ... of the devices.

    Primitives take turns, so that a slow moment of the machine hits all alike. What the host needs
    to start a program is part of the time.

    Args:
        devices: neighbours are taken first.
        sizes: bytes, see `Measurement.size`.
        runs: of each, after two that are not counted.

    Raises:
        SettingError: fewer than two devices, or a size that has not 4 bytes for each.
    """
    if len(devices) < 2:
        raise SettingError(
            f"there is {len(devices)} {devices[0].platform} device, and nothing to exchange.",
            ("devices",),
            hint="On CPU ask for simulated ones: --devices=8.",
        )
    if runs < 1:
        raise SettingError(f"runs={runs} has to be at least 1.", ("runs",))
    for size in sizes:
        if size < 4 * len(devices):
            raise SettingError(
                f"{size} bytes have not 4 for each of {len(devices)} devices.", ("sizes",)
            )
    found = []
    for count in partition_counts(len(devices)):
        mesh = Mesh(np.asarray(devices[:count]), (_AXIS,), axis_types=(AxisType.Auto,))
        for size in sizes:
            found += _in_turn(mesh, size, runs)
    return found


def program(
    primitive: str, mesh: Mesh, size: int
) -> tuple[jax.stages.Compiled, Float[Array, " n"]]:
    """Compile one primitive; return it with numbers of that size on each device of the mesh."""
    count = mesh.size
    length = size // 4 // count * count  # an all-to-all has as much for each
    split = NamedSharding(mesh, PartitionSpec(_AXIS))
    x = jax.jit(lambda: jnp.arange(count * length, dtype=jnp.float32), out_shardings=split)()

    def local(x: Float[Array, " n"]) -> Float[Array, " n"]:
        return PRIMITIVES[primitive].function(x, count)

    spec = PartitionSpec(_AXIS)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(x).compile(), x


def _in_turn(mesh: Mesh, size: int, runs: int) -> list[Measurement]:
    programs = {name: program(name, mesh, size) for name in PRIMITIVES}
    seconds: dict[str, list[float]] = {name: [] for name in PRIMITIVES}
    for run in range(-2, runs):
        for name, (exchange, x) in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(exchange(x))
            if run >= 0:
                seconds[name].append(time.perf_counter() - began)
    return [Measurement(name, size, mesh.size, tuple(times)) for name, times in seconds.items()]


def log_log_slope(points: Mapping[int, float]) -> float | None:
    """Fit time = a * partitions^slope by least squares of the logarithms; None below 2 points."""
    if len(points) < 2:
        return None
    x, y = (np.log(list(column)) for column in (points.keys(), points.values()))
    slope = float(np.polyfit(x, y, 1)[0])
    return slope if math.isfinite(slope) else None

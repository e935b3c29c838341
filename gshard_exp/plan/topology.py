"""Machines by name: `v3:32x32` (libtpu describes it) or `cpu:8`; and the public figures of chips.

Nothing here needs the machine. libtpu's compiler takes a described topology: the generation and the
number of chips along each axis of the torus.
"""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence

import jax

from gshard_exp.errors import SettingError
from gshard_exp.sharding.mesh import simulated_devices

CPU = "cpu"


@dataclasses.dataclass(frozen=True)
class Chip:
    """Public figures of one chip.

    Attributes:
        peak_flops: bfloat16 operations a second (float32 products are multiplied in bfloat16 by
            default, in one pass).
        hbm_bytes: memory.
        hbm_bandwidth: bytes a second.
        link_bandwidth: bytes a second over one link in one direction.
        clock: Hz, of the cycles that the compiler estimates.
        devices: JAX devices (cores) on a chip, as libtpu describes it.
        available: bytes of memory that a program may take on a device: what the compiler of libtpu
            0.0.52 says when one does not fit.
        ring: an axis of the torus of so many chips, or a multiple, closes to a ring; others are
            lines.
        source: of the other figures.
        unit: rows and columns of a matrix unit.
    """

    peak_flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    clock: float
    devices: int
    available: int
    ring: int
    source: str
    unit: int = 128


_GIB = 2**30


def _gib(number: float) -> int:
    return round(number * _GIB)


_CACM = "Jouppi et al., A domain-specific supercomputer for training DNNs, CACM 63(7), 2020"
_V4 = "Jouppi et al., TPU v4, arXiv 2304.01433, table 4"
_CLOUD = "Google Cloud documentation, system architecture of "
# Link bandwidth is a chip's published total in one direction over its links. Clocks of v5e, v5p and
# v6e are not published. Those of v5e and v5p are the peak over the operations of a cycle: 2 x 128 x
# 128 in each of 4 and 8 matrix units (Cloud documentation). v6e's is a guess, that of v5p. Rings:
# v2 and v3 along a side of a whole pod; v4 and v5p from a cube of 4 chips on (Cloud documentation);
# v5e and v6e along 16 chips (Austin et al., How to Scale Your Model, chapter 2). Of v5p's 96 GiB
# the documentation counts the 95 that are left to programs.
#            peak, memory, its bandwidth, a link's, clock, devices, available, ring, source
CHIPS = {
    "v2": Chip(46e12, 16 * _GIB, 700e9, 496e9 / 8, 700e6, 2, _gib(7.48), 16, _CACM),
    "v3": Chip(
        123e12, 32 * _GIB, 900e9, 70e9, 940e6, 2, _gib(15.48), 32, _CACM + "; links: " + _V4
    ),
    "v4": Chip(275e12, 32 * _GIB, 1200e9, 50e9, 1050e6, 1, _gib(30.75), 4, _V4),
    "v5e": Chip(
        197e12, 16 * _GIB, 819e9, 1600e9 / 8 / 4, 1500e6, 1, _gib(15.75), 16, _CLOUD + "v5e"
    ),
    "v5p": Chip(
        459e12, 96 * _GIB, 2765e9, 4800e9 / 8 / 6, 1750e6, 1, _gib(95.73), 4, _CLOUD + "v5p"
    ),
    "v6e": Chip(
        918e12,
        32 * _GIB,
        1640e9,
        3200e9 / 8 / 4,
        1750e6,
        1,
        _gib(31.24),
        16,
        _CLOUD + "v6e",
        unit=256,
    ),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine that a program can be compiled for.

    Attributes:
        name: as the user wrote it.
        chip: figures of its chips; None for simulated CPU devices, whose speed is anybody's.
        shape: chips along each axis of the torus; (devices,) on CPU.
    """

    name: str
    chip: Chip | None
    shape: tuple[int, ...]

    @property
    def cores(self) -> int:
        """Number of JAX devices."""
        return math.prod(self.shape) * (self.chip.devices if self.chip else 1)

    @property
    def available(self) -> int | None:
        """Bytes of memory that a program may take on one device; None on CPU."""
        return self.chip.available if self.chip else None

    @property
    def peak_flops(self) -> float | None:
        """Operations a second of one device."""
        return self.chip.peak_flops / self.chip.devices if self.chip else None

    def devices(self) -> Sequence[jax.Device]:
        """Return descriptions to compile for; on CPU simulated devices.

        Raises:
            SettingError: libtpu is missing, or does not take the shape.
        """
        if self.chip is None:
            return simulated_devices(self.shape[0])
        return _described(self.name)


def parse_topology(name: str) -> Topology:
    """Read `v3:32x32`, `v4:4x4x4` or `cpu:8`.

    Raises:
        SettingError: no such machine.
    """
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+){0,2})", name)
    kind = found.group(1) if found else ""
    shape = tuple(int(n) for n in found.group(2).split("x")) if found else ()
    if kind == CPU and len(shape) == 1 and shape[0] > 0:
        return Topology(name, None, shape)
    if kind not in CHIPS or len(shape) < 2 or 0 in shape:
        raise SettingError(
            f"--topology={name} is no machine known here: it is cpu:N, or a generation "
            f"({', '.join(CHIPS)}) and the chips along each axis of its torus.",
            hint="For example v3:32x32 (2048 cores), v4:4x4x4, v5e:16x16 or cpu:8.",
        )
    return Topology(name, CHIPS[kind], shape)


def require_compiler(topology: Topology) -> None:
    """Refuse a TPU topology where libtpu is not installed.

    Raises:
        SettingError: with how to get it.
    """
    if topology.chip is not None and importlib.util.find_spec("libtpu") is None:
        raise SettingError(
            f"--topology={topology.name} needs the TPU compiler, and libtpu is not installed "
            "(no TPU is needed).",
            hint="pip install 'gshard_exp[tpu-plan]', or plan on CPU devices: --topology=cpu:8.",
        )


def _described(name: str) -> Sequence[jax.Device]:
    # libtpu would ask the network who this machine is, and refuse a second process.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    from jax.experimental import topologies

    # The two cores of a v4 chip work as one device; JAX arranges no mesh of them apart.
    options = {"chip_config_name": "megacore"} if name.startswith("v4:") else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise SettingError(
            f"libtpu does not take --topology={name}: {str(error).splitlines()[0]}.",
            hint="Chips come in hosts of 2x2 (v4 and v5p: 2x2x1): set multiples of that.",
        ) from error

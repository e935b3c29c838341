"""Device meshes from a spec. The only module that asks JAX for devices."""

import dataclasses
import importlib.metadata
import importlib.util
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from gshard_exp import axes
from gshard_exp.errors import SettingError
from gshard_exp.sharding.host_memory import keep_freed_memory

FILL = -1
_GOOGLE = "0x1ae0"  # on the PCI bus
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Size of each mesh axis; -1 (at most once) takes the devices that the others leave.

    The mesh is built exactly as asked or not at all: no axis is shrunk to fit. On CPU a mesh of n
    devices (no size -1) makes n simulated devices, provided that JAX has not started yet.

    Attributes:
        data: batch rows and routing groups are split over this axis (and over `expert`).
        expert: experts are split over this axis.
        model: heads and hidden widths may be split over this axis.
    """

    data: int = 1
    expert: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        sizes = (self.data, self.expert, self.model)
        if sizes.count(FILL) > 1 or any(n < 1 and n != FILL for n in sizes):
            raise SettingError(
                f"the mesh data={self.data}, expert={self.expert}, model={self.model} has no "
                "meaning: each size is at least 1, and at most one of them is -1 (take what the "
                "others leave). Set positive sizes",
                settings=("data", "expert", "model"),
            )

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Arrange devices as (data, expert, model).

        Args:
            devices: those to use, for instance of a described topology; default: this process's.

        Returns:
            A mesh with axes `data`, `expert`, `model`. Devices beyond its size stay idle.

        Raises:
            SettingError: the sizes need more devices than there are, or do not divide them.
        """
        if devices is None:
            devices = self._local_devices()
        sizes = dataclasses.astuple(self.filled(len(devices)))
        count = math.prod(sizes)
        if count > len(devices):
            raise SettingError(
                f"the mesh data={sizes[0]} x expert={sizes[1]} x model={sizes[2]} needs {count} "
                f"devices and there are {len(devices)} ({devices[0].platform}).",
                settings=("data", "expert", "model"),
                hint=f"Set sizes that multiply to at most {len(devices)}, or run with "
                "JAX_PLATFORMS=cpu to simulate as many devices as the mesh asks for.",
            )
        if count < len(devices):
            logger.warning("The mesh uses %d of %d devices.", count, len(devices))
        chosen = list(devices)[:count]
        if chosen[0].platform == "tpu" and count == len(devices):
            grid = mesh_utils.create_device_mesh(
                sizes, devices=chosen, allow_split_physical_axes=True
            )
        else:
            grid = np.asarray(chosen).reshape(sizes)
        return Mesh(grid, axes.MESH_AXES, axis_types=(AxisType.Auto,) * 3)

    @property
    def count(self) -> int:
        """Number of devices; a size of -1 counts as 1."""
        return math.prod(1 if n == FILL else n for n in (self.data, self.expert, self.model))

    def abstract(self) -> AbstractMesh:
        """Return the sizes alone, for checks that need no devices; -1 counts as 1."""
        sizes = (self.data, self.expert, self.model)
        return AbstractMesh(tuple(1 if n == FILL else n for n in sizes), axes.MESH_AXES)

    def _local_devices(self) -> list[jax.Device]:
        sizes = (self.data, self.expert, self.model)
        if FILL not in sizes:
            simulate_cpu_devices(math.prod(sizes))
        _leave_out_absent_tpu()
        if _computes_on_cpu():
            keep_freed_memory()
        # Not before the lines above: the question starts JAX, and with it its threads.
        if jax.process_count() > 1:
            raise SettingError(f"{jax.process_count()} processes: a run is one process for now.")
        return jax.devices()

    def filled(self, num_devices: int) -> "MeshSpec":
        """Return the sizes on so many devices, with a number in place of -1.

        Raises:
            SettingError: the other sizes do not divide the devices.
        """
        sizes = [self.data, self.expert, self.model]
        if FILL in sizes:
            rest = math.prod(n for n in sizes if n != FILL)
            if num_devices % rest:
                raise SettingError(
                    f"{num_devices} devices cannot be split into data={self.data}, "
                    f"expert={self.expert}, model={self.model}: {rest} does not divide "
                    f"{num_devices}. Set sizes that divide it",
                    settings=("data", "expert", "model"),
                )
            sizes[sizes.index(FILL)] = num_devices // rest
        return MeshSpec(*sizes)


def simulated_devices(count: int) -> Sequence[jax.Device]:
    """Return `count` CPU devices, to plan for.

    Raises:
        SettingError: JAX has started with fewer.
    """
    simulate_cpu_devices(count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise SettingError(f"JAX runs with {len(devices)} CPU devices; {count} are asked for.")
    return devices[:count]


def _leave_out_absent_tpu() -> None:
    """Keep JAX from starting a TPU where only its compiler is installed (`plan` needs it).

    It would fail, say so in several lines, and take a second.
    """
    if jax.config.jax_platforms or importlib.util.find_spec("libtpu") is None:
        return
    # Chips up to v4 are /dev/accel0, ..., later ones /dev/vfio/0, ...; on the bus all are Google's.
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    vendors = {path.read_text().strip() for path in Path("/sys/bus/pci/devices").glob("*/vendor")}
    others = importlib.metadata.entry_points(group="jax_plugins")
    if not chips and _GOOGLE not in vendors and not others:
        jax.config.update("jax_platforms", "cpu")


def _computes_on_cpu() -> bool:
    """Tell, without starting JAX, that it will find nothing but the CPU."""
    if jax.config.jax_platforms:
        return jax.config.jax_platforms == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and importlib.util.find_spec("libtpu") is None


def simulate_cpu_devices(count: int) -> None:
    """Ask JAX for `count` CPU devices, if it has not started; on other platforms it is ignored."""
    if count <= max(1, jax.config.jax_num_cpu_devices):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # JAX runs already: the devices that it has are the ones to use; build() checks the count.
        logger.debug("JAX has started; the number of CPU devices stays as it is.")

"""Device assignments: the integer arrays by which the paper's `shard` places partitions."""

import itertools
from collections.abc import Sequence

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from gshard_exp.errors import SettingError

Assignment = Int[np.ndarray, "..."] | Sequence


def assigned_sharding(mesh: Mesh, device_assignment: Assignment, *, rank: int) -> NamedSharding:
    """Return the sharding that lays partition p of an array on device `assignment.flat[p]`.

    Source: section 3.2, `shard`: an integer array of the rank of the tensor, one element for each
    partition, each the id of a device.

    Departure: it names every device of the mesh. The paper's has one element for each partition,
    which may be fewer; JAX runs a program on all devices of its mesh or none.

    Args:
        mesh: the devices that may be named, in the order that the program has.
        device_assignment: device ids; size n along a dimension cuts it into n partitions.
        rank: of the array.

    Raises:
        SettingError: another rank, ids that are unknown, twice or missing, or another order than
            the mesh's, counted along the dimensions of the assignment in any sequence.
    """
    ids = _checked(mesh, device_assignment, rank)
    order = _device_ids(mesh)
    for dimensions in itertools.permutations(range(ids.ndim)):
        # [[0, 4], [1, 5], ...] is the order 0, 1, ..., 7, counted along the rows first.
        turned = ids.transpose(dimensions)
        if turned.ravel().tolist() == order:
            names = {dimension: f"dimension_{dimension}" for dimension in dimensions}
            return NamedSharding(
                Mesh(
                    mesh.devices.reshape(turned.shape),
                    tuple(names.values()),
                    axis_types=(AxisType.Auto,) * ids.ndim,
                ),
                PartitionSpec(*(names[dimension] for dimension in range(ids.ndim))),
            )
    raise SettingError(
        f"the device assignment {ids.tolist()} has the devices in the order {ids.ravel().tolist()} "
        f"and the mesh in the order {order}: JAX gives a program one order of devices.",
        hint="Run the whole program in the order of the assignment, with the mesh that "
        "mesh_in_order(mesh, device_assignment) returns, or call shard outside of jit, between "
        "programs, which sends the partitions over.",
    )


def mesh_in_order(mesh: Mesh, device_assignment: Assignment) -> Mesh:
    """Return a mesh of the same axes and sizes whose devices follow one another as assigned.

    Under `partitioning` of this mesh `shard` takes this device assignment.

    Raises:
        SettingError: ids that are unknown, twice or missing.
    """
    ids = _checked(mesh, device_assignment, np.ndim(device_assignment))
    by_id = {device.id: device for device in mesh.devices.flat}
    devices = np.asarray([by_id[number] for number in ids.flat]).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _device_ids(mesh: Mesh) -> list[int]:
    return [device.id for device in mesh.devices.flat]


def _checked(mesh: Mesh, device_assignment: Assignment, rank: int) -> np.ndarray:
    ids = np.asarray(device_assignment)
    known = sorted(_device_ids(mesh))
    if not np.issubdtype(ids.dtype, np.integer):
        raise SettingError(f"the device assignment is of {ids.dtype}: device ids are integers.")
    if ids.ndim != rank:
        raise SettingError(
            f"the device assignment of shape {ids.shape} has {ids.ndim} dimensions and the array "
            f"{rank}: they have to match.",
            hint="Give it size 1 along the dimensions that stay whole.",
        )
    numbers, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise SettingError(
            f"the device assignment {ids.tolist()} names device {numbers[counts > 1][0]} twice: a "
            "device holds one partition.",
            hint=f"Name each of {known} once.",
        )
    if unknown := sorted(set(numbers.tolist()) - set(known)):
        raise SettingError(
            f"the device assignment {ids.tolist()} names device {unknown[0]}, which is not in the "
            f"mesh of {len(known)} devices.",
            hint=f"Name each of {known} once.",
        )
    if missing := sorted(set(known) - set(numbers.tolist())):
        raise SettingError(
            f"the device assignment {ids.tolist()} makes {ids.size} partitions and leaves out "
            f"device {missing[0]} of the mesh's {len(known)}: a program runs on all of them.",
            hint="Name every device, or make a mesh of fewer devices.",
        )
    return ids

"""Sharding annotations on values: by the logical names of dimensions, or by hand as in the paper.

`constrain` is what model code uses. `replicate`, `split` and `shard` are the paper's interface
(section 3.2 and appendix A.3). All four return the value that they were given, shape and all; what
changes is where its parts lie, and what the partitioner infers from that for other values. They
work on values of a program (in `jit`, under `grad`, `vmap`, `scan`, `checkpoint`) and on arrays
between programs.

With `replicate`, `split` and `shard` a size that does not divide is cut into parts of the size
rounded up, and the partitioner pads the last ones (`constrain` refuses it: a rule is meant for
every size that it meets). Only inside a program, for JAX refuses such parts at its border: as an
argument, as a result (which JAX then replicates) and in `device_put`. A NumPy constant is an array
between programs, wherever it is written.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from gshard_exp.errors import SettingError
from gshard_exp.sharding.assignment import Assignment, assigned_sharding, mesh_in_order
from gshard_exp.sharding.rules import Rules


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """What annotations mean while a function is traced."""

    mesh: Mesh
    rules: Rules | None


_active: contextvars.ContextVar[Partitioning | None] = contextvars.ContextVar(
    "active", default=None
)


@contextlib.contextmanager
def partitioning(mesh: Mesh, rules: Rules | None = None) -> Iterator[None]:
    """Make annotations mean this mesh and these rules while a function is traced.

    Outside such a context `constrain` is the identity: a layer can be tried alone.

    Args:
        mesh: the devices of the program, in its one order.
        rules: for `constrain`; the annotations by hand need none.
    """
    token = _active.set(Partitioning(mesh, rules))
    try:
        yield
    finally:
        _active.reset(token)


def active_partitioning() -> Partitioning | None:
    """Return what the innermost `partitioning` says; None outside."""
    return _active.get()


def constrain(x: Shaped[Array, "..."], *names: str | None) -> Shaped[Array, "..."]:
    """Annotate a value with the logical name of each dimension.

    The value and its global shape do not change. Source: `split` and `replicate` of section 3.2,
    by name instead of by dimension.

    Args:
        x: any array inside a traced function.
        *names: one logical axis for each dimension; None replicates that dimension.

    Raises:
        SettingError: as `Rules.spec`.
    """
    active = _active.get()
    if active is None:
        return x
    if active.rules is None:
        raise SettingError(
            f"an activation {tuple(names)} has logical names, and there are no rules for them.",
            hint="Enter partitioning(mesh, rules).",
        )
    sharding = active.rules.sharding(
        names, shape=x.shape, mesh=active.mesh, what=f"an activation {tuple(names)}"
    )
    return jax.lax.with_sharding_constraint(x, sharding)


def replicate(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Annotate a value as whole on every device.

    Raises:
        SettingError: outside of `partitioning`.
    """
    return _annotate(x, NamedSharding(_mesh("replicate"), PartitionSpec()))


def split(
    x: Shaped[Array, "..."], split_dimension: int, num_partitions: int
) -> Shaped[Array, "..."]:
    """Annotate a value as cut into partitions along one dimension, whole along the others.

    The partitions lie along the mesh axes whose sizes multiply to `num_partitions`: the fewest,
    and of those the first in the order of the mesh. If these are all axes, partition i lies on the
    i-th device.

    Departure: with fewer partitions than devices each partition lies on several devices, those
    along the remaining axes. The paper has it on one, and leaves the other devices without.

    Args:
        x: any value of rank 1 or more.
        split_dimension: the dimension; a negative one counts from the last.
        num_partitions: any size will do, see the head of this module.

    Raises:
        SettingError: no such dimension, no mesh axes that multiply to `num_partitions`, a size that
            does not divide outside of a program, or outside of `partitioning`.
    """
    mesh = _mesh("split")
    rank = jnp.ndim(x)
    if not -rank <= split_dimension < rank:
        raise SettingError(
            f"split_dimension={split_dimension} is not a dimension of an array of shape "
            f"{jnp.shape(x)}.",
            hint=f"Choose one of 0 to {rank - 1}." if rank else "A scalar can be replicated only.",
        )
    entries: list[tuple[str, ...] | None] = [None] * rank
    entries[split_dimension] = _axes_of_size(mesh, num_partitions)
    return _annotate(x, NamedSharding(mesh, PartitionSpec(*entries)))


def shard(x: Shaped[Array, "..."], device_assignment: Assignment) -> Shaped[Array, "..."]:
    """Annotate a value as cut along any number of dimensions, each partition on a given device.

    Outside of a program any order of devices will do, and the partitions are sent there. Inside,
    the order is that of the mesh, see `assignment.mesh_in_order`.

    Args:
        x: any value.
        device_assignment: device ids, an array of the rank of `x`: of shape [1, 2, 4] it cuts
            [3, 16, 64] into 8 partitions of [3, 8, 16].

    Raises:
        SettingError: as `assigned_sharding`, a size that does not divide outside of a program, or
            outside of `partitioning`.
    """
    mesh = _mesh("shard")
    if not isinstance(x, jax.core.Tracer):
        mesh = mesh_in_order(mesh, device_assignment)
    return _annotate(x, assigned_sharding(mesh, device_assignment, rank=jnp.ndim(x)))


def _mesh(annotation: str) -> Mesh:
    active = _active.get()
    if active is None:
        raise SettingError(
            f"{annotation} has no mesh whose devices could hold the parts.",
            hint="Enter partitioning(mesh) first, with the mesh of MeshSpec(...).build().",
        )
    return active.mesh


def _axes_of_size(mesh: Mesh, num_partitions: int) -> tuple[str, ...] | None:
    """Return mesh axes whose sizes multiply to a number; None for 1."""
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    # Of one product the last choice stays: the fewest axes, the first of the mesh.
    fitting = {
        math.prod(sizes[axis] for axis in chosen): chosen
        for count in range(len(sizes), -1, -1)
        for chosen in reversed(list(itertools.combinations(sizes, count)))
    }
    if num_partitions in fitting:
        return fitting[num_partitions] or None
    shape = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    than = f", more than its {mesh.size} devices" if num_partitions > mesh.size else ""
    raise SettingError(
        f"num_partitions={num_partitions} is no product of axes of the mesh {shape}{than}.",
        hint=f"Choose one of {', '.join(map(str, sorted(fitting)))}, or another mesh.",
    )


def _annotate(x: Shaped[Array, "..."], sharding: NamedSharding) -> Shaped[Array, "..."]:
    parts = _partitions(sharding, jnp.ndim(x))
    uneven = [dim for dim, count in enumerate(parts) if jnp.shape(x)[dim] % count]
    if isinstance(x, jax.core.Tracer):
        return (_within_a_program if uneven else jax.lax.with_sharding_constraint)(x, sharding)
    if uneven:
        size, count = jnp.shape(x)[uneven[0]], parts[uneven[0]]
        raise SettingError(
            f"dimension {uneven[0]} of an array of shape {jnp.shape(x)} does not divide into "
            f"{count} partitions: outside of a program JAX keeps equal parts only.",
            hint="Annotate it inside jit, where the partitioner pads the last part, or make the "
            f"size {size + -size % count}.",
        )
    return jax.device_put(x, sharding)


@functools.partial(jax.jit, static_argnums=1)
def _within_a_program(x: Shaped[Array, "..."], sharding: NamedSharding) -> Shaped[Array, "..."]:
    """Annotate sizes that do not divide; `grad` outside of `jit` traces, and is no program."""
    return jax.lax.with_sharding_constraint(x, sharding)


def _partitions(sharding: NamedSharding, rank: int) -> Sequence[int]:
    """Count the partitions along each dimension."""
    counts = [1] * rank
    for dimension, entry in enumerate(sharding.spec):
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            counts[dimension] *= sharding.mesh.shape[axis]
    return counts

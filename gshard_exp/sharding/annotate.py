"""Sharding annotations on values inside a model: names in, constraints out."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Shaped

from gshard_exp.errors import SettingError
from gshard_exp.sharding.rules import Names, Rules


@dataclasses.dataclass(frozen=True)
class _Active:
    mesh: Mesh
    rules: Rules


_active: contextvars.ContextVar[_Active | None] = contextvars.ContextVar("active", default=None)


@contextlib.contextmanager
def partitioning(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """Make `constrain` mean this mesh and these rules while a function is traced.

    Outside such a context `constrain` is the identity: a layer can be tried alone.
    """
    token = _active.set(_Active(mesh, rules))
    try:
        yield
    finally:
        _active.reset(token)


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
    sharding = active.rules.sharding(
        names, shape=x.shape, mesh=active.mesh, what=f"an activation {tuple(names)}"
    )
    return jax.lax.with_sharding_constraint(x, sharding)


def sum_over_devices(
    function: Callable[..., Array],
    arguments: Mapping[str, tuple[Array, Names]],
    *,
    result: Names,
    over: Names,
) -> Array:
    """Call a function on each device with its part of the arguments, and sum the results.

    For what the partitioner cannot split by itself, such as a loop over data-dependent slices.
    Outside `partitioning` it is the plain call.

    Args:
        function: of arrays in the order of `arguments`, of any size in dimensions that are split.
        arguments: what each is, for errors, with its value and the logical name of each dimension.
        result: logical names of the result; what it depends on stays on the same device.
        over: logical axes over whose mesh axes results are summed.

    Raises:
        SettingError: as `Rules.spec`, or a mesh axis splits the result and is summed over.
    """
    active = _active.get()
    values = [value for value, _ in arguments.values()]
    if active is None:
        return function(*values)
    mesh, rules = active.mesh, active.rules
    specs = tuple(
        rules.spec(names, shape=value.shape, mesh=mesh, what=f"an activation, {what}")
        for what, (value, names) in arguments.items()
    )
    summed = rules.mesh_axes(over)
    split = set(rules.mesh_axes(result)) & set(summed)
    if split:
        raise SettingError(
            f"the mesh axis {min(split)!r} splits both {tuple(result)} and {tuple(over)}: parts of "
            "different tokens would be summed. Set one of the two rules to None",
            settings=("table",),
        )

    def share(*parts: Array) -> Array:
        return jax.lax.psum(function(*parts), summed)

    out_spec = PartitionSpec(*(rules.mesh_axes((name,)) or None for name in result))
    return jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=out_spec, check_vma=False)(
        *values
    )

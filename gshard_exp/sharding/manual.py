"""Functions that see the part of each device, within programs that are partitioned otherwise."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from gshard_exp.errors import SettingError
from gshard_exp.sharding.annotate import Partitioning, active_partitioning
from gshard_exp.sharding.rules import Names, Rules

Arguments = Mapping[str, tuple[Array, Names]]


def manual(
    function: Callable[..., Any],
    arguments: Arguments,
    *,
    result: Any,
    over: Names | None = None,
) -> Any:
    """Call a function on each part of the arguments, along some mesh axes.

    Along the others its values stay whole in shape and are split by the partitioner, as outside.
    What it does is local, except for collectives that it calls by the name of a mesh axis. For
    what is local by construction and the partitioner cannot know to be: a gather whose indices
    stay within a group. Outside `partitioning`, or where the rules split nothing of `over`, it is
    the plain call.

    Source: section 3.2, "mixing manual and automatic sharding": `auto_to_manual_spmd_partition` of
    each argument, `manual_to_auto_spmd_partition` of the result. `jax.shard_map` does both.

    Args:
        function: of arrays in the order of `arguments`, of any size in dimensions that are split.
        arguments: what each is, for errors, with its value and the logical name of each dimension.
        result: logical names of the result; of a tuple or dict of results, a tuple or dict of
            names. Along mesh axes that these do not mention all parts have to give the same.
        over: logical axes whose mesh axes are manual; None: every mesh axis.

    Raises:
        SettingError: as `Rules.spec`, and no rules.
    """
    values = [value for value, _ in arguments.values()]
    active = active_partitioning()
    if active is None:
        return function(*values)
    mesh, rules = active.mesh, _rules(active)
    manual_axes = set(mesh.axis_names if over is None else rules.mesh_axes(over))
    if not manual_axes:  # which shard_map would take for all of them
        return function(*values)

    def kept(names: Names, shape: tuple[int, ...], what: str) -> PartitionSpec:
        whole = rules.spec(names, shape=shape, mesh=mesh, what=f"an activation, {what}")
        return PartitionSpec(*(_only(entry, manual_axes) for entry in whole))

    in_specs = tuple(kept(names, value.shape, what) for what, (value, names) in arguments.items())
    out_specs = jax.tree.map(
        # The shape is not known yet; 0 divides by everything.
        lambda names: kept(names, (0,) * len(names), "the result"),
        result,
        is_leaf=_are_names,
    )
    # In jit, for JAX cannot run a program that is manual in part one operation at a time.
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=manual_axes,
            check_vma=False,
        )
    )(*values)


def sum_over_devices(
    function: Callable[..., Array], arguments: Arguments, *, result: Names, over: Names
) -> Array:
    """Call a function on each device with its part of the arguments, and sum the results.

    For what the partitioner cannot split by itself, such as a loop over data-dependent slices.
    Outside `partitioning` it is the plain call.

    Args:
        function: as in `manual`.
        arguments: as in `manual`.
        result: logical names of the result; what it depends on stays on the same device.
        over: logical axes over whose mesh axes results are summed.

    Raises:
        SettingError: as `Rules.spec`, or a mesh axis splits the result and is summed over.
    """
    active = active_partitioning()
    if active is None:
        return function(*(value for value, _ in arguments.values()))
    rules = _rules(active)
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

    return manual(share, arguments, result=result)


def _rules(active: Partitioning) -> Rules:
    if active.rules is None:
        raise SettingError(
            "a manual function names logical axes, and there are no rules for them.",
            hint="Enter partitioning(mesh, rules).",
        )
    return active.rules


def _only(entry: Any, manual_axes: set[str]) -> tuple[str, ...] | None:
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return tuple(axis for axis in axes if axis in manual_axes) or None


def _are_names(node: Any) -> bool:
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)

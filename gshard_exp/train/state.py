"""The train state: what a checkpoint holds of a model, made on the mesh in its shardings."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt32

from gshard_exp.model.contract import Model, Params
from gshard_exp.paths import parameter_path
from gshard_exp.sharding.rules import Names, Rules, shard_bytes
from gshard_exp.train.optimizer import Optimizer, state_names


class TrainState(flax.struct.PyTreeNode):
    """Everything that a step reads and writes.

    Attributes:
        step: int32 scalar, batches seen.
        updates: int32 scalar, steps that changed the parameters: all but the skipped ones.
        params: nested dict of float32 arrays.
        opt_state: optax state.
        rng: uint32[2], key data of the run; each step folds its number into it.
        skipped: int32 scalar, steps skipped in a row because loss or gradient was not finite.
    """

    step: Int[Array, ""]
    updates: Int[Array, ""]
    params: Params
    opt_state: optax.OptState
    rng: UInt32[Array, "2"]
    skipped: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class StatePlan:
    """Shapes, names and shardings of a train state, known without allocating it.

    Attributes:
        names: logical axes of the parameters, nested dict of tuples.
        abstract: `TrainState` of `jax.ShapeDtypeStruct`s with shardings.
        tx: the optimizer's transformation.
    """

    model: Model
    names: Mapping[str, Names]
    abstract: TrainState
    tx: optax.GradientTransformation
    mesh: Mesh

    @property
    def shardings(self) -> TrainState:
        """Sharding of each leaf."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    def init(self, seed: int) -> TrainState:
        """Make the state of step 0, each array born in its sharding."""
        make = jax.jit(lambda key: _init(self.model, self.tx, key), out_shardings=self.shardings)
        return make(jax.random.key(seed))


def plan_state(model: Model, optimizer: Optimizer, mesh: Mesh, rules: Rules) -> StatePlan:
    """Work out the train state of a model on a mesh, without allocating anything.

    Raises:
        SettingError: a rule is missing, or a size does not divide; the parameter is named.
    """
    params, names = abstract_params(model)
    tx = optimizer.make(names)
    # The key is made within the trace, since one made outside would start a device.
    shapes = jax.eval_shape(lambda: _init(model, tx, jax.random.key(0)))

    def replicated(leaf):
        return _on_mesh(leaf, NamedSharding(mesh, PartitionSpec()))

    opt_names = state_names(shapes.opt_state, names, params)
    abstract = TrainState(
        step=replicated(shapes.step),
        updates=replicated(shapes.updates),
        params=_placed(shapes.params, names, mesh, rules),
        opt_state=_placed(shapes.opt_state, opt_names, mesh, rules.for_optimizer()),
        rng=replicated(shapes.rng),
        skipped=replicated(shapes.skipped),
    )
    return StatePlan(model, names, abstract, tx, mesh)


def placed_params(model: Model, mesh: Mesh, rules: Rules) -> Params:
    """Lay the parameters of a model out on a mesh: shapes and shardings, no arrays.

    Raises:
        SettingError: as `plan_state`.
    """
    return _placed(*abstract_params(model), mesh, rules)


def _placed(tree: Any, names: Any, mesh: Mesh, rules: Rules) -> Any:
    """Give each leaf the sharding that the rules make of its names; `names` is a tree alike."""

    def place(path, leaf, leaf_names):
        what = parameter_path(path)
        return _on_mesh(leaf, rules.sharding(leaf_names, shape=leaf.shape, mesh=mesh, what=what))

    return jax.tree_util.tree_map_with_path(place, tree, names)


def _on_mesh(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def abstract_params(model: Model) -> tuple[Params, Mapping[str, Names]]:
    """Return shapes and logical names of a model's parameters; nothing is allocated.

    The key is made within the trace, since one made outside would start a device.
    """
    names: dict = {}

    def init():
        params, found = model.init(jax.random.key(0))
        names.update(found)
        return params

    return jax.eval_shape(init), names


def num_params(params: Params) -> int:
    """Count parameters, abstract or not."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def model_info(plan: StatePlan) -> str:
    """Tabulate parameters: path, shape, logical axes, partition spec, bytes per device."""
    lines = []
    flat = jax.tree_util.tree_leaves_with_path(plan.abstract.params)
    names = jax.tree.leaves(plan.names, is_leaf=lambda leaf: isinstance(leaf, tuple))
    for (path, leaf), leaf_names in zip(flat, names, strict=True):
        size = shard_bytes(leaf)
        shape = ", ".join(f"{n}={d}" for n, d in zip(leaf_names, leaf.shape, strict=True))
        lines.append(
            f"Variable {parameter_path(path)} size {math.prod(leaf.shape)} shape ({shape}) "
            f"partition spec {tuple(leaf.sharding.spec)} bytes per device {size}"
        )
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    lines.append(f"Total number of parameters: {num_params(plan.abstract.params)}")
    lines.append(f"Parameter bytes per device: {shard_bytes(plan.abstract.params)}")
    lines.append(f"Optimizer state bytes per device: {shard_bytes(plan.abstract.opt_state)}")
    lines.append(f"Mesh: {mesh}")
    return "\n".join(lines) + "\n"


def _init(model: Model, tx: optax.GradientTransformation, key) -> TrainState:
    init_key, run_key = jax.random.split(key)
    params, _ = model.init(init_key)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        updates=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=tx.init(params),
        rng=jax.random.key_data(run_key),
        skipped=jnp.zeros((), jnp.int32),
    )

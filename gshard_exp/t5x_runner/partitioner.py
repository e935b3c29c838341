"""t5x's partitioner on our mesh and by our rules, on every platform."""

import functools
from collections.abc import Callable
from typing import Any

from flax.traverse_util import empty_node, flatten_dict, unflatten_dict
from jax.sharding import Mesh
from t5x.partitioning import PjitPartitioner

from gshard_exp.sharding.annotate import partitioning
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.sharding.rules import Rules


class MeshPartitioner(PjitPartitioner):
    """Lays train states and batches out as `train.state.plan_state` does.

    t5x's own has the mesh axes `data` and `model` only, and on CPU ignores `num_partitions`
    (t5x/partitioning.py, `default_mesh`, `get_cpu_mesh`). It gives a mesh axis that two dimensions
    of an array ask for to the first rule; here that is an error, as are sizes that do not divide.
    """

    def __init__(self, mesh: MeshSpec, rules: Rules) -> None:
        # Now: a mesh of simulated devices has to be built before JAX starts.
        self._mesh = mesh.build()
        self._rules = rules
        super().__init__(num_partitions=1, logical_axis_rules=rules.table)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self._mesh

    def partition(
        self, fn: Callable, in_axis_resources: Any, out_axis_resources: Any, **how: Any
    ) -> Any:
        """Compile for the mesh, as t5x does; `constrain` within means this mesh and these rules."""

        @functools.wraps(fn)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            with partitioning(self.mesh, self._rules):
                return fn(*args, **kwargs)

        return super().partition(annotated, in_axis_resources, out_axis_resources, **how)

    def get_mesh_axes(self, train_state: Any) -> Any:
        """Return a train state of partition specs; optimizer state has rules of its own.

        Raises:
            SettingError: as `Rules.spec`.
        """
        logical_axes = self.get_logical_axes(train_state)
        shapes = flatten_dict(train_state.state_dict(), keep_empty_nodes=True)
        specs = {}
        for path, names in flatten_dict(logical_axes.state_dict(), keep_empty_nodes=True).items():
            rules = self._rules if path[0] == "target" else self._rules.for_optimizer()
            specs[path] = names
            if names is not None and names is not empty_node:
                shape = shapes[path].shape
                specs[path] = rules.spec(names, shape=shape, mesh=self.mesh, what="/".join(path))
        return logical_axes.restore_state(unflatten_dict(specs))

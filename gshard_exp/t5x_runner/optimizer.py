"""Our optimizers as t5x knows them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.core import freeze, unfreeze
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool
from t5x.metrics import Sum
from t5x.optimizers import OptaxWrapper, OptimizerState

from gshard_exp.train.optimizer import Optimizer, state_names


class NamedOptimizer(OptaxWrapper):
    """An optimizer that knows the logical axes of its parameters, and of its state.

    t5x's wrapper of optax names the state of some transformations only, and has factored moments
    not among them (t5x/optimizers.py, `OptaxStatePartitionRules`). It follows a schedule of its
    own; t5x's `learning_rate_fn` is for the record. As in `train.step`, a step whose gradient is
    not finite changes nothing but the step's number.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._names: dict = {}
        super().__init__(optax.identity())  # replaced as soon as parameters have names

    def set_param_axes(self, param_logical_axes: Any) -> None:
        """Take the names; t5x calls it before it makes any state."""
        self._names = jax.tree.map(tuple, unfreeze(param_logical_axes))
        self.optax_optimizer = self.optimizer.make(self._names)

    def init_state(self, params: Any) -> OptimizerState:
        """Make the state of step 0."""
        return OptimizerState(
            step=jnp.zeros((), jnp.int32),
            param_states=self.optax_optimizer.init(unfreeze(params)),
        )

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """Take a step; `hyper_params`, t5x's learning rate, is not used."""
        del hyper_params
        before, grads = unfreeze(params), unfreeze(grads)
        finite = _finite(grads)
        updates, opt_state = self.optax_optimizer.update(grads, state.param_states, before)
        after = optax.apply_updates(before, updates)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)  # noqa: E731
        return freeze(keep(after, before)), OptimizerState(
            step=state.step + 1, param_states=keep(opt_state, state.param_states)
        )

    def derive_logical_axes(self, optimizer: Any, param_logical_axes: Any) -> Any:
        """Return parameters and state with the names of their dimensions instead of arrays."""
        opt_state = optimizer.state.param_states
        names = state_names(opt_state, self._names, unfreeze(optimizer.target))
        specs = jax.tree.map(lambda _, leaf: PartitionSpec(*leaf), opt_state, names)
        return optimizer.replace(
            target=param_logical_axes, state=OptimizerState(step=None, param_states=specs)
        )


class SkippedSteps:
    """Counts the steps that `NamedOptimizer` skips, as the metric `skipped_steps`.

    Of t5x's hooks around a step, its `WeightMetricsComputer` (t5x/trainer.py) is the one that is
    shown the gradient.
    """

    def compute_metrics(self, gradients: Any, old_train_state: Any, new_train_state: Any) -> dict:
        """Return the metric; t5x adds it to those of the loss."""
        del old_train_state, new_train_state
        return {"skipped_steps": Sum(total=1.0 - _finite(gradients).astype(jnp.float32))}


def _finite(gradients: Any) -> Bool[Array, ""]:
    return jnp.isfinite(optax.tree.norm(gradients))

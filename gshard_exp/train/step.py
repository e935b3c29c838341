"""The train step: a pure function from (state, batch) to (state, metrics)."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from gshard_exp import axes
from gshard_exp.model.contract import Batch, Model, Params
from gshard_exp.sharding.annotate import partitioning
from gshard_exp.sharding.rules import Names, Rules
from gshard_exp.train.state import StatePlan, TrainState

StepFunction = Callable[[TrainState, Batch], tuple[TrainState, dict]]


def partitioned_train_step(
    plan: StatePlan, rules: Rules, microbatches: int = 1, gradient_dtype: str = "float32"
) -> StepFunction:
    """Return `train_step` compiled for a mesh; it donates the state that it is given.

    Args:
        plan: of the state.
        rules: logical axis -> mesh axis.
        microbatches: parts of the batch that are computed in turn.
        gradient_dtype: of the gradients of the stacks' matrices, see `rounded`.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        with partitioning(plan.mesh, rules):
            return train_step(
                state,
                batch,
                model=plan.model,
                tx=plan.tx,
                microbatches=microbatches,
                differentiated=lambda params: rounded(params, plan.names, gradient_dtype),
            )

    return jax.jit(step, donate_argnums=0, out_shardings=(plan.shardings, None))


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Model,
    tx: optax.GradientTransformation,
    microbatches: int = 1,
    differentiated: Callable[[Params], Params] = lambda params: params,
) -> tuple[TrainState, dict]:
    """Take one optimizer step.

    A step whose loss or gradient is not finite changes neither parameters nor optimizer state; it
    only counts. So no state that is saved afterwards is poisoned, whatever the run's policy.

    Args:
        state: donated by the caller's jit.
        batch: global arrays, those of `model.batch_entries`.
        model: network and losses.
        tx: the optimizer.
        microbatches: parts of the batch that are computed in turn. The result is that of the whole
            batch up to rounding: losses are divided by the whole batch's weights, and random
            numbers belong to rows.
        differentiated: what of the parameters the gradient is taken of: `rounded`.

    Returns:
        The next state, and metrics: sums over target tokens, means, router health by layer, and
        `grad_norm`, `loss`, `finite`, `skipped` in a row, and `updates` before this step.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    total_weight = model.weight(batch)
    rows = jnp.arange(len(next(iter(batch.values()))))
    batch = {**batch, "rows": rows}

    def loss(params, part):
        return model.loss(
            params, part, key=key, total_weight=total_weight, share=1.0 / microbatches
        )

    def gradient(params, part):
        found, grads = jax.value_and_grad(loss, has_aux=True)(differentiated(params), part)
        return found, jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, params)

    (loss_value, metrics), grads = accumulate(gradient, state.params, batch, microbatches)

    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss_value) & jnp.isfinite(grad_norm)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)  # noqa: E731
    next_state = state.replace(
        step=state.step + 1,
        updates=state.updates + finite,
        params=keep(params, state.params),
        opt_state=keep(opt_state, state.opt_state),
        skipped=jnp.where(finite, 0, state.skipped + 1),
    )
    return next_state, {
        **metrics,
        "loss": loss_value,
        "grad_norm": grad_norm,
        "finite": finite,
        "updates": state.updates,
        "skipped": next_state.skipped,
    }


def rounded(params: Params, names: Mapping[str, Names], dtype: str) -> Params:
    """Round the matrices of the stacks, so that their gradients have that dtype too.

    A model whose activations are bfloat16 multiplies these rounded in any case. All gradients are
    alive at the end of the backward pass: in bfloat16 they take half the memory, and half the bytes
    of their sums over devices. Routers and gains, which compute in float32, and embeddings stay.
    """

    def is_matrix(names: Names) -> bool:
        return names[:1] == (axes.LAYERS,) and len(names) > 2 and axes.ROUTER_EXPERT not in names

    return jax.tree.map(
        lambda param, names: param.astype(dtype) if is_matrix(tuple(names)) else param,
        params,
        names,
    )


def accumulate(gradient, params, batch: Batch, microbatches: int):
    """Sum a function over consecutive parts of a batch.

    Any function of parameters and a part whose results, a tree of arrays, add up to the whole's:
    losses, metrics, gradients.
    """
    if microbatches == 1:
        return gradient(params, batch)
    parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

    def add(total, part):
        return jax.tree.map(jnp.add, total, gradient(params, part)), None

    first = jax.tree.map(lambda x: x[0], parts)
    zero = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, params, first)
    )
    total, _ = jax.lax.scan(add, zero, parts)
    return total

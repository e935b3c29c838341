"""Optimizers and schedules, as dataclasses that make optax transformations."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from gshard_exp import axes
from gshard_exp.errors import SettingError, require_at_least, require_positive, require_within
from gshard_exp.moe.layer import ROUTER_BIAS
from gshard_exp.paths import path_keys
from gshard_exp.sharding.rules import Names

# optax.adafactor factors the second moment of arrays whose two largest dimensions reach this.
_MIN_FACTORED = 128

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class SqrtDecay:
    """learning_rate / sqrt(max(step, constant_steps)): flat, then falling as 1 / sqrt(step).

    Source: appendix A.2, "learning rate 1.0 with square-root decay after 10k steps", read as
    lingvo's `SqrtDecay`: 0.01 for 10,000 steps, then 1 / sqrt(step), with no linear warm-up.
    """

    learning_rate: float = 1.0
    constant_steps: int = 10_000

    def __post_init__(self) -> None:
        require_positive(self, "learning_rate")
        require_at_least(self, 1, "constant_steps")

    def __call__(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the rate at a step (counted from 0)."""
        floor = jnp.maximum(jnp.asarray(step, jnp.float32), self.constant_steps)
        return self.learning_rate * jax.lax.rsqrt(floor)


@dataclasses.dataclass(frozen=True)
class WarmupCosine:
    """Linear from 0 to `peak` over `warmup_steps`, then a cosine down to `final` at `total_steps`.

    Not in the paper; the common recipe for short runs.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self, "peak")
        require_at_least(self, 0.0, "final")
        if not 0 <= self.warmup_steps < self.total_steps:
            raise SettingError(
                f"warmup_steps={self.warmup_steps} does not fit in total_steps="
                f"{self.total_steps}: the warm-up ends before the schedule does. Set fewer",
                settings=("warmup_steps", "total_steps"),
            )

    def __call__(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the rate at a step (counted from 0)."""
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, self.peak, self.warmup_steps, self.total_steps, self.final
        )
        return jnp.asarray(schedule(step), jnp.float32)


class Optimizer(Protocol):
    """What the train step asks of an optimizer."""

    @property
    def learning_rate(self) -> Schedule:
        """Return the schedule, for the record."""
        ...

    def make(self, names: Mapping[str, Names]) -> optax.GradientTransformation:
        """Return the transformation for parameters with these logical axes (a nested dict)."""
        ...


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Adafactor with the paper's settings as defaults (appendix A.2).

    beta1 = 0, factored second moment, update clipping 1.0; the decay at step t is 1 - t^-0.8, as
    lingvo runs it (the paper prints "beta2 = 0.99 with 1 - t^-0.8 schedule"; with that schedule
    0.99 has no effect). Updates are relative to the RMS of a parameter, as in lingvo. Of an array
    with more than two dimensions the two largest are factored (optax and lingvo agree).

    Statistics that span a whole array (its RMS, the clipped update's RMS, the factored moments)
    are taken for each layer apart where layers are stacked, so that stacking changes no update.

    Attributes:
        learning_rate: schedule of the relative step size.
        decay_exponent: 0.8 in the decay above.
        clipping_threshold: of the RMS of a layer's update.
        max_grad_norm: clip the global norm of the gradient before; None does not.
        router_bias_rate: step of the biases of routers, where there are any, see
            `moe.biased.BiasedTopKGating`. 1e-3 in DeepSeek-V3 (arXiv 2412.19437, section 4.2).
    """

    learning_rate: SqrtDecay | WarmupCosine = SqrtDecay()
    decay_exponent: float = 0.8
    clipping_threshold: float = 1.0
    max_grad_norm: float | None = None
    router_bias_rate: float = 1e-3

    def __post_init__(self) -> None:
        require_positive(self, "decay_exponent", "clipping_threshold", "max_grad_norm")
        require_at_least(self, 0.0, "router_bias_rate")

    def make(self, names: Mapping[str, Names]) -> optax.GradientTransformation:
        """Return the transformation, layer by layer for stacked parameters."""
        one = optax.adafactor(
            self.learning_rate,
            min_dim_size_to_factor=_MIN_FACTORED,
            decay_rate=self.decay_exponent,
            clipping_threshold=self.clipping_threshold,
            momentum=None,
        )
        inner = _clipped(self.max_grad_norm, _layer_by_layer(one, names))
        return _but_router_bias(inner, names, self.router_bias_rate)


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled weight decay; not in the paper.

    Attributes:
        learning_rate: schedule of the step size.
        max_grad_norm: clip the global norm of the gradient before; None does not.
        router_bias_rate: step of the biases of routers, where there are any, see
            `moe.biased.BiasedTopKGating`. 1e-3 in DeepSeek-V3 (arXiv 2412.19437, section 4.2).
    """

    learning_rate: SqrtDecay | WarmupCosine
    b1: float = 0.9
    b2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    router_bias_rate: float = 1e-3

    def __post_init__(self) -> None:
        require_within(self, 0.0, 1.0, "b1", "b2")
        require_positive(self, "epsilon", "max_grad_norm")
        require_at_least(self, 0.0, "weight_decay", "router_bias_rate")

    def make(self, names: Mapping[str, Names]) -> optax.GradientTransformation:
        """Return the transformation; it is elementwise, so that stacking does not matter."""
        adamw = optax.adamw(
            self.learning_rate, self.b1, self.b2, self.epsilon, weight_decay=self.weight_decay
        )
        return _but_router_bias(_clipped(self.max_grad_norm, adamw), names, self.router_bias_rate)


def state_names(opt_state: optax.OptState, names: Mapping[str, Names], params: Mapping) -> object:
    """Name the dimensions of optimizer state after the parameters that they belong to.

    Args:
        opt_state: (abstract) state, as made by `Optimizer.make(...).init`.
        names: logical axes of the parameters, a nested dict of tuples.
        params: (abstract) parameters of the same structure.

    Returns:
        A tree like `opt_state` whose leaves are tuples of logical axes or None, one for each
        dimension.
    """
    flat_names = jax.tree_util.tree_leaves_with_path(names, is_leaf=_is_names)
    by_path = {path_keys(path): leaf for path, leaf in flat_names}
    shapes = {path_keys(p): leaf.shape for p, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def name_leaf(path, leaf) -> tuple[str | None, ...]:
        keys = path_keys(path)
        for start in range(len(keys)):
            owner = keys[start:]
            if owner in by_path:
                return _moment_names(keys[:start], leaf.shape, by_path[owner], shapes[owner])
        return (None,) * leaf.ndim

    return jax.tree_util.tree_map_with_path(name_leaf, opt_state)


def _moment_names(kind, shape, names, param_shape) -> tuple[str | None, ...]:
    """Name one moment of one parameter: of its own shape, factored, or optax's (1,) stand-in."""
    names = tuple(names)
    if shape == param_shape:
        return names
    stacked = int(bool(names) and names[0] == axes.LAYERS)
    if shape[stacked:] == (1,):
        return (*names[:stacked], None)
    # optax averages v_row over the largest dimension and v_col over the second largest.
    order = np.argsort(param_shape[stacked:])
    dropped = stacked + int(order[-1] if "v_row" in kind else order[-2])
    if shape != param_shape[:dropped] + param_shape[dropped + 1 :]:
        raise ValueError(f"optimizer state {kind} of shape {shape} fits no moment of {param_shape}")
    return names[:dropped] + names[dropped + 1 :]


def _is_names(leaf: object) -> bool:
    return isinstance(leaf, tuple)


def _clipped(
    max_norm: float | None, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
    if max_norm is None:
        return inner
    return optax.chain(optax.clip_by_global_norm(max_norm), inner)


def _layer_by_layer(
    inner: optax.GradientTransformation, names: Mapping[str, Names]
) -> optax.GradientTransformation:
    """Apply `inner` to each layer of stacked parameters as if it were a parameter of its own.

    Stacks may differ in depth, and one `vmap` has one length: stacks are told apart by their path
    from the root (encoder, decoder).
    """

    def label(path, leaf) -> str:
        return path_keys(path)[0] if leaf and leaf[0] == axes.LAYERS else "unstacked"

    labels = jax.tree_util.tree_map_with_path(label, names, is_leaf=_is_names)
    by_path = {path_keys(path): kind for path, kind in jax.tree_util.tree_leaves_with_path(labels)}
    vmapped = optax.GradientTransformation(
        jax.vmap(inner.init),
        lambda updates, state, params=None: jax.vmap(inner.update)(updates, state, params),
    )
    return optax.partition(
        {kind: inner if kind == "unstacked" else vmapped for kind in sorted(set(by_path.values()))},
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: by_path[path_keys(path)], params
        ),
    )


def _but_router_bias(
    inner: optax.GradientTransformation, names: Mapping[str, Names], rate: float
) -> optax.GradientTransformation:
    """Apply `inner` to all parameters but biases of routers, which take steps of `rate` by load.

    What stands for the gradient of such a bias is the load of its expert over the mean: see
    `moe.layer.MoeLayer`. It counts in no norm.
    """

    def label(path, _leaf) -> str:
        return "bias" if path_keys(path)[-1] == ROUTER_BIAS else "trained"

    labels = jax.tree_util.tree_map_with_path(label, names, is_leaf=_is_names)
    if "bias" not in jax.tree.leaves(labels):
        return inner
    return optax.partition({"trained": inner, "bias": optax.sign_sgd(rate)}, labels)

"""Experts choose tokens, instead of tokens experts."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gshard_exp.errors import require_at_least, require_positive
from gshard_exp.moe.capacity import Rounding
from gshard_exp.moe.routing import LimitedGating, Routing, masked_softmax


@dataclasses.dataclass(frozen=True)
class ExpertChoiceGating(LimitedGating):
    """Let each expert take the C tokens of a group that have the largest gates for it.

    Every expert is full and there is no load to balance; a token is held by any number of experts,
    or by none. The weight is the gate, not normalised. Which tokens an expert takes depends on all
    tokens of the group, so that a decoder would see the future: it refuses this function. For the
    same reason a limited capacity is part of it.

    Source: Expert Choice (arXiv 2202.09368), section 3; google/flaxformer,
    flaxformer/architectures/moe/routing.py (ExpertsChooseMaskedRouter). Departures: experts never
    take padding tokens, and leave slots empty where there are fewer tokens than slots. Among equal
    gates the first token wins.

    Attributes:
        num_choices: the mean number of experts per token at capacity factor 1, the paper's c.
        most_experts: a token is held by so many experts at most, those with the largest gates
            (their slots stay empty at the others). None, the paper's plain form, does not limit.
            Costs of moving tokens grow with it, or with E.
        min_capacity: the fewest slots an expert has per group, however small S/E is.
        capacity_rounding: see `slots_per_expert`.
    """

    num_choices: int = 2
    most_experts: int | None = None
    min_capacity: int = 1
    capacity_rounding: Rounding = "ceil"

    def __post_init__(self) -> None:
        """Refuse numbers without meaning."""
        require_at_least(self, 1, "num_choices")
        require_positive(self, "most_experts")
        self.check_capacity_rule()

    @property
    def looks_ahead(self) -> bool:
        """A token behind may take the place of this one."""
        return True

    @property
    def needs_capacity(self) -> bool:
        """With as many slots as tokens every expert takes every token."""
        return True

    def __call__(
        self,
        logits: Float[Array, "G S E"],
        valid: Bool[Array, "G S"],
        capacity: int,
        uniform: None = None,
        bias: None = None,
    ) -> Routing:
        """Let experts take tokens; see `Gating`.

        Returns:
            The routing with K = E, or `most_experts`: those that took the token, largest gate
            first, then others.
        """
        del uniform, bias
        probs_GSE = masked_softmax(logits, valid)
        # -1 is below every gate: padding is taken last, and given back.
        wanted_GES = jnp.swapaxes(jnp.where(valid[..., None], probs_GSE, -1.0), 1, 2)
        order_GES = jnp.argsort(-jax.lax.stop_gradient(wanted_GES), axis=-1, stable=True)
        rank_GSE = jnp.swapaxes(jnp.argsort(order_GES, axis=-1), 1, 2).astype(jnp.int32)
        taken_GSE = (rank_GSE < capacity) & valid[..., None]
        liked_GSE = jax.lax.stop_gradient(jnp.where(taken_GSE, probs_GSE, -1.0))
        expert_GSK = jnp.argsort(-liked_GSE, axis=-1, stable=True)[..., : self.most_experts]
        kept_GSK = jnp.take_along_axis(taken_GSE, expert_GSK, axis=-1)
        gate_GSK = jnp.take_along_axis(probs_GSE, expert_GSK, axis=-1)
        return Routing(
            expert=expert_GSK.astype(jnp.int32),
            slot=jnp.take_along_axis(rank_GSE, expert_GSK, axis=-1),
            kept=kept_GSK,
            weight=jnp.where(kept_GSK, gate_GSK, 0.0),
            probs=probs_GSE,
            attempted=kept_GSK,
            aux_loss=jnp.zeros(logits.shape[0], jnp.float32),
        )

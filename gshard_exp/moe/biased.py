"""Top-K gating that a bias balances instead of a loss, as DeepSeek-V3 has it."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gshard_exp.errors import require_at_least, require_one_of, require_positive
from gshard_exp.moe.capacity import Rounding
from gshard_exp.moe.queues import one_hot, queue_in_turn, select
from gshard_exp.moe.routing import (
    LimitedGating,
    Routing,
    load_balancing_loss,
    normalized,
)


@dataclasses.dataclass(frozen=True)
class BiasedTopKGating(LimitedGating):
    """Route each token to the K experts whose score plus bias is largest.

    Scores are sigmoids of the logits. The bias decides who is chosen and nothing else: weights are
    the scores without it, normalised over the choices and times `scale`. It belongs to the layer,
    which lets the optimizer raise it for experts with less than the mean load and lower it for the
    others (`train.optimizer.router_bias_rate`), a fixed step each time.

    `Routing.probs` are the scores divided by their sum over experts, and the auxiliary loss counts
    all K choices: times E^2/K it is the "complementary sequence-wise" balance loss (equations 17 to
    20), which the paper weighs with 1e-4, for a group instead of a sequence.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2; deepseek-ai/DeepSeek-V3,
    inference/model.py (Gate). Departures: padding tokens are neither routed nor counted; a capacity
    may be set, where there is none in the paper.

    Attributes:
        num_choices: K; no more than there are experts are taken.
        scale: of the weights, `route_scale`.
        score: "sigmoid", or "softmax" of the logits.
        min_capacity: the fewest slots an expert has per group, however small S/E is.
        capacity_rounding: see `slots_per_expert`.
    """

    num_choices: int = 8
    scale: float = 1.0
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    min_capacity: int = 1
    capacity_rounding: Rounding = "ceil"

    def __post_init__(self) -> None:
        """Refuse names and numbers without meaning."""
        require_at_least(self, 1, "num_choices")
        require_positive(self, "scale")
        require_one_of(self, ("sigmoid", "softmax"), "score")
        self.check_capacity_rule()

    @property
    def has_bias(self) -> bool:
        """The bias is what this is about."""
        return True

    def __call__(
        self,
        logits: Float[Array, "G S E"],
        valid: Bool[Array, "G S"],
        capacity: int,
        uniform: None = None,
        bias: Float[Array, " E"] | None = None,
    ) -> Routing:
        """Route every valid token to at most K experts; see `Gating`. No bias is a bias of 0."""
        del uniform
        num_experts = logits.shape[-1]
        logits_GSE = jnp.where(valid[..., None], logits.astype(jnp.float32), 0.0)
        function = jax.nn.sigmoid if self.score == "sigmoid" else jax.nn.softmax
        score_GSE = jnp.where(valid[..., None], function(logits_GSE), 0.0)
        biased_GSE = score_GSE if bias is None else score_GSE + bias[None, None, :]
        choices = min(self.num_choices, num_experts)
        _, expert_GSK = jax.lax.top_k(jax.lax.stop_gradient(biased_GSE), choices)
        hot = [one_hot(expert_GSK[..., k], num_experts) for k in range(choices)]
        gate_GSK = normalized(jnp.stack([select(own_GSE, score_GSE) for own_GSE in hot], axis=-1))

        slot_GSK, count_GE = queue_in_turn(expert_GSK, valid, num_experts)
        attempted_GSK = jnp.broadcast_to(valid[..., None], expert_GSK.shape)
        kept_GSK = attempted_GSK & (slot_GSK < capacity)
        probs_GSE = normalized(score_GSE)
        return Routing(
            expert=expert_GSK,
            slot=slot_GSK,
            kept=kept_GSK,
            weight=jnp.where(kept_GSK, self.scale * gate_GSK, 0.0),
            probs=probs_GSE,
            attempted=attempted_GSK,
            aux_loss=load_balancing_loss(probs_GSE, count_GE, valid),
        )

"""Noisy top-K gating with importance and load losses, as V-MoE has it."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gshard_exp.errors import require_at_least, require_one_of
from gshard_exp.moe.capacity import Rounding
from gshard_exp.moe.queues import by_gate, one_hot, queue_in_turn, select
from gshard_exp.moe.routing import ORDERS, LimitedGating, Order, Routing, masked_softmax

_EDGE = 1e-6  # from 0 and 1, where the inverse of the normal distribution is infinite


@dataclasses.dataclass(frozen=True)
class NoisyTopKGating(LimitedGating):
    """Route each token to the K experts whose gates are largest after noise on the logits.

    In training normal noise of deviation noise_std / E is added to the logits. All first choices
    take slots first, then all second choices, and so on. The weights are the noisy gates, not
    normalised. Losses are those of appendix A.2: squared coefficients of variation (deviation over
    mean, across experts) of

    - importance: the sum of an expert's gates without noise;
    - load: the mean probability that noise drawn anew would bring the expert's logit over the K-th
      largest noisy logit of the token.

    Without noise (in evaluation, or at deviation 0) there is no load loss.

    Source: V-MoE (arXiv 2106.05974), section 2 and appendix A; google-research/vmoe,
    vmoe/nn/routing.py (NoisyTopExpertsPerItemRouter). Departures: padding tokens are neither routed
    nor counted.

    Attributes:
        num_choices: K; no more than there are experts are taken.
        noise_std: times 1/E, the deviation of the noise.
        importance_weight: of the importance loss; `Routing.aux_loss` times E^2 is the weighted sum
            of both.
        load_weight: of the load loss.
        order: tokens queue by "position", or by "gate", largest first gate first: batch priority,
            section 4.1. By gate it is refused in a decoder.
        min_capacity: the fewest slots an expert has per group, however small S/E is.
        capacity_rounding: see `slots_per_expert`.
    """

    num_choices: int = 2
    noise_std: float = 1.0
    importance_weight: float = 1.0
    load_weight: float = 1.0
    order: Order = "position"
    min_capacity: int = 1
    capacity_rounding: Rounding = "ceil"

    def __post_init__(self) -> None:
        """Refuse names and numbers without meaning."""
        require_at_least(self, 1, "num_choices")
        require_at_least(self, 0, "noise_std", "importance_weight", "load_weight")
        require_one_of(self, ORDERS, "order")
        self.check_capacity_rule()

    @property
    def looks_ahead(self) -> bool:
        """By gate, a token may lose its first slot to one behind it."""
        return self.order == "gate"

    def noise_shape(self, num_experts: int) -> tuple[int, ...] | None:
        """Ask for one number for each expert."""
        return (num_experts,) if self.noise_std else None

    def __call__(
        self,
        logits: Float[Array, "G S E"],
        valid: Bool[Array, "G S"],
        capacity: int,
        uniform: Float[Array, "G S E"] | None,
        bias: None = None,
    ) -> Routing:
        """Route every valid token to at most K experts; see `Gating`."""
        del bias
        num_experts = logits.shape[-1]
        logits_GSE = jnp.where(valid[..., None], logits.astype(jnp.float32), 0.0)
        quiet_GSE = masked_softmax(logits, valid)
        noisy_GSE, probs_GSE, deviation = logits_GSE, quiet_GSE, self.noise_std / num_experts
        if uniform is not None:
            normal_GSE = jax.scipy.special.ndtri(jnp.clip(uniform, _EDGE, 1 - _EDGE))
            noisy_GSE = logits_GSE + deviation * normal_GSE
            probs_GSE = masked_softmax(noisy_GSE, valid)
        choices = min(self.num_choices, num_experts)
        _, expert_GSK = jax.lax.top_k(jax.lax.stop_gradient(noisy_GSE), choices)
        hot = [one_hot(expert_GSK[..., k], num_experts) for k in range(choices)]
        gate_GSK = jnp.stack([select(chosen_GSE, probs_GSE) for chosen_GSE in hot], axis=-1)

        loss_G = self.importance_weight * _variation(jnp.sum(quiet_GSE, axis=1))
        if uniform is not None and self.load_weight:
            threshold_GS = select(hot[-1], noisy_GSE)
            missing_GSE = (logits_GSE - threshold_GS[..., None]) / deviation
            wins_GSE = jnp.where(valid[..., None], jax.scipy.special.ndtr(missing_GSE), 0.0)
            loss_G += self.load_weight * _variation(jnp.sum(wins_GSE, axis=1))

        order_GS = by_gate(gate_GSK[..., 0]) if self.order == "gate" else None
        slot_GSK, _ = queue_in_turn(expert_GSK, valid, num_experts, order_GS)
        attempted_GSK = jnp.broadcast_to(valid[..., None], expert_GSK.shape)
        kept_GSK = attempted_GSK & (slot_GSK < capacity)
        return Routing(
            expert=expert_GSK,
            slot=slot_GSK,
            kept=kept_GSK,
            weight=jnp.where(kept_GSK, gate_GSK, 0.0),
            probs=probs_GSE,
            attempted=attempted_GSK,
            aux_loss=loss_G / num_experts**2,
        )


def _variation(of_expert: Float[Array, "G E"]) -> Float[Array, " G"]:
    """Return the variance over experts divided by the squared mean; 0 for a group of padding."""
    mean_G = jnp.mean(of_expert, axis=-1)
    square_G = jnp.square(jnp.where(mean_G > 0, mean_G, 1.0))
    return jnp.var(of_expert, axis=-1) / square_G

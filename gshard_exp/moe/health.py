"""Tell whether a router is well: numbers of one MoE layer and one batch, from its `Routing`.

Names shared with t5x mean what they mean there unless said otherwise.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gshard_exp.moe.routing import Routing


def router_health(
    routing: Routing, valid: Bool[Array, "G S"], capacity: int | None
) -> dict[str, Float[Array, ""] | Float[Array, " E"]]:
    """Return the health metrics of one MoE layer, as plain float32 means over the batch.

    No gradient passes. The keys do not depend on the gating: with one choice per token the numbers
    of second choices are 0. A batch of padding only gives 0 everywhere, except `unused_experts`.

    Averages over equally full microbatches, layers or steps: everything marked (mean) may be
    averaged, and with weights proportional to valid tokens the average is that of the whole. The
    others describe one batch; their average is the average over batches and no more.

    Args:
        routing: what the gating function returned for all groups of the batch.
        valid: False on padding tokens, which count nowhere below.
        capacity: C, slots per (group, expert). None: no slot that no token asked for.

    Returns:
        expert_load: [E], share of all choices that asked for a slot, sums to 1.
        max_over_mean_load: largest entry of `expert_load` over the mean, 1 (even) to E.
        unused_experts: number of experts that received no token of the batch.
        expert_usage: fraction of all G * E * C slots that hold a token (mean over slots); 1 without
            a capacity.
        fraction_dropped_first: fraction of valid tokens whose first choice overflowed (mean).
        fraction_dropped_second: fraction of valid tokens whose second choice overflowed (mean).
        fraction_rejected_second: fraction of valid tokens whose second choice was rejected at
            random, whether or not there was a slot (mean).
        fraction_tokens_left_behind: fraction of valid tokens that no expert holds (mean).
        router_entropy: entropy of the gates, nats per valid token, 0 to log E (mean).
        router_confidence: largest gate, before any normalisation, per valid token, 1/E to 1 (mean).
            t5x averages the combine weights of kept choices, which for weights normalised over two
            choices is near 1/2 whatever the router does.
        auxiliary_loss: line 13 of Algorithm 1, mean over all groups (0 for one of padding alone).
    """
    routing = jax.lax.stop_gradient(routing)
    num_experts = routing.probs.shape[-1]
    num_valid = jnp.maximum(jnp.sum(valid), 1).astype(jnp.float32)

    def of_valid(count_GS: Bool[Array, "G S"] | Float[Array, "G S"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(valid, count_GS, 0), dtype=jnp.float32) / num_valid

    overflowed_GSK = routing.attempted & ~routing.kept
    if routing.expert.shape[-1] > 1 and num_experts > 1:
        dropped_second = of_valid(overflowed_GSK[..., 1])
        rejected_second = of_valid(~routing.attempted[..., 1])
    else:
        dropped_second = rejected_second = jnp.zeros((), jnp.float32)

    attempted_E = count_per_expert(routing, routing.attempted, num_experts)
    load_E = attempted_E / jnp.maximum(jnp.sum(attempted_E), 1.0)
    kept_E = count_per_expert(routing, routing.kept, num_experts)
    num_slots = jnp.maximum(jnp.sum(kept_E), 1.0)
    if capacity is not None:
        num_slots = valid.shape[0] * num_experts * capacity
    return {
        "expert_load": load_E,
        "max_over_mean_load": jnp.max(load_E) * num_experts,
        "unused_experts": jnp.sum(kept_E == 0, dtype=jnp.float32),
        "expert_usage": jnp.sum(kept_E) / num_slots,
        "fraction_dropped_first": of_valid(overflowed_GSK[..., 0]),
        "fraction_dropped_second": dropped_second,
        "fraction_rejected_second": rejected_second,
        "fraction_tokens_left_behind": of_valid(~jnp.any(routing.kept, axis=-1)),
        "router_entropy": of_valid(jnp.sum(jax.scipy.special.entr(routing.probs), axis=-1)),
        "router_confidence": of_valid(jnp.max(routing.probs, axis=-1)),
        "auxiliary_loss": jnp.mean(routing.aux_loss),
    }


def count_per_expert(
    routing: Routing, which: Bool[Array, "G S K"], num_experts: int
) -> Float[Array, " E"]:
    """Count the marked choices of each expert over all groups. float32 is exact to 2^24."""
    total_E = jnp.zeros(num_experts, jnp.float32)
    for choice in range(which.shape[-1]):
        hot_GSE = jax.nn.one_hot(routing.expert[..., choice], num_experts, dtype=jnp.bool_)
        marked_GSE = hot_GSE & which[..., choice, None]
        total_E += jnp.sum(marked_GSE, axis=(0, 1), dtype=jnp.int32).astype(jnp.float32)
    return total_E

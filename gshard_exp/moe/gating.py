"""Choose experts as Algorithm 1 does, or the best one: pure functions, no parameters and no mesh.

Groups are independent of one another, and nothing here is larger than [G, S, E]: the [G, S, E, C]
mask of Algorithm 2 belongs to one way of moving tokens, `dispatch.EinsumDispatch`.

Source: GShard (arXiv 2006.16668), Algorithm 1, whose line numbers the comments cite; Switch
Transformer (arXiv 2101.03961), section 2.
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gshard_exp.errors import require_one_of, require_positive
from gshard_exp.moe.capacity import Rounding
from gshard_exp.moe.queues import by_gate, one_hot, queue, select
from gshard_exp.moe.routing import (
    ORDERS,
    LimitedGating,
    Order,
    Routing,
    gumbel,
    load_balancing_loss,
    masked_softmax,
    normalized,
)


@dataclasses.dataclass(frozen=True)
class Top2Gating(LimitedGating):
    """Route each token to its two best experts: Algorithm 1, group-level top-2 gating.

    In this order, within each group: every first choice takes a position in its expert's queue, in
    token order; then every second choice queues behind all first choices. A queue position is used
    up even by a choice that overflows (line 11) or is rejected at random (line 22 stands outside
    the `if`), so a rejected second choice can leave a slot empty. Weights are normalised over the
    two gates before anything is dropped and are not renormalised afterwards: a token that loses
    one expert comes back with less than its full weight.

    Departures: padding tokens are not in the paper. They are neither routed nor counted, and S in
    lines (3) and (13) is the number of valid tokens of the group. With one expert there is no
    second choice: the first has weight 1. Among equal gates the lowest expert index wins, for both
    choices.

    The attributes are where public code departs from Algorithm 1, which is their defaults. The
    presets of `gin/moe/` say who does what.

    Attributes:
        second_choice: "random" tosses the coin of line (20); "all" never rejects a second choice,
            not even one whose gate is 0; "sampled" draws the second expert itself, in proportion to
            the gates of all but the first, and rejects none. In evaluation nothing is drawn.
        second_threshold: the coin keeps a second choice with probability g2 / threshold, surely
            from the threshold on. 0.5 is the paper's 2 * g2 > rnd. g2 is normalised as `normalize`
            says: if not before the drops, the coin sees the gate itself.
        rejected_choice: "queues" uses up a position, as line (22) does; "steps_aside" uses none,
            and those behind move up.
        second_queue: second choices queue behind the first choices that were "attempted" (lines 11
            and 18), or behind those "kept". Changes the positions of choices that overflow and
            nothing else: where first choices overflow, no second one finds a slot either way.
        normalize: divide the gates by their sum over both choices "before_drops" (lines 6 and 16);
            "after_drops", over the choices kept, so that one that is left has weight 1; or "never".
        aux_counts: c_e in line (13) counts the "first" choices, or "all": both of every token,
            rejected or not. Overflow is counted in either case. At an even load "all" makes the
            loss twice as large.
        order: tokens queue by "position", or by "gate": largest first gate first, for both
            choices (batch-prioritised). By gate, first choices too depend on the tokens behind
            them (second ones always do), which a decoder refuses.
        min_capacity: the fewest slots an expert has per group, however small S/E is.
        capacity_rounding: see `slots_per_expert`.
    """

    num_choices: ClassVar[int] = 2
    second_choice: Literal["random", "all", "sampled"] = "random"
    second_threshold: float = 0.5
    rejected_choice: Literal["queues", "steps_aside"] = "queues"
    second_queue: Literal["attempted", "kept"] = "attempted"
    normalize: Literal["before_drops", "after_drops", "never"] = "before_drops"
    aux_counts: Literal["first", "all"] = "first"
    order: Order = "position"
    min_capacity: int = 1
    capacity_rounding: Rounding = "ceil"

    def __post_init__(self) -> None:
        """Refuse names and numbers without meaning."""
        require_one_of(self, ("random", "all", "sampled"), "second_choice")
        require_positive(self, "second_threshold")
        require_one_of(self, ("queues", "steps_aside"), "rejected_choice")
        require_one_of(self, ("attempted", "kept"), "second_queue")
        require_one_of(self, ("before_drops", "after_drops", "never"), "normalize")
        require_one_of(self, ("first", "all"), "aux_counts")
        require_one_of(self, ORDERS, "order")
        self.check_capacity_rule()

    @property
    def looks_ahead(self) -> bool:
        """By gate, a token may lose its first slot to one behind it."""
        return self.order == "gate"

    def noise_shape(self, num_experts: int) -> tuple[int, ...] | None:
        """Ask for one number a token for the coin, or one for each expert to sample by."""
        return {"random": (), "sampled": (num_experts,), "all": None}[self.second_choice]

    def __call__(
        self,
        logits: Float[Array, "G S E"],
        valid: Bool[Array, "G S"],
        capacity: int,
        uniform: Float[Array, "G S ..."] | None,
        bias: None = None,
    ) -> Routing:
        """Route every valid token to at most two experts.

        Args:
            logits: router outputs in any float dtype; the softmax is taken in float32.
            valid: False on padding tokens, whose logits may be anything, NaN included.
            capacity: C, slots per (group, expert).
            uniform: rnd of line (17), drawn from U[0, 1) per token. The second expert is kept with
                probability 2 * g2. None is for evaluation, where the paper says nothing: rnd = 0,
                so the second expert is taken whenever there is a slot and its gate is not 0. Of
                shape [G, S, E] where the second choice is "sampled".
            bias: not used.

        Returns:
            The routing, with K = 2.
        """
        del bias
        num_experts = logits.shape[-1]
        probs_GSE = masked_softmax(logits, valid)
        # (6) and (16): top2. -1 is below every gate, so a first choice is never its own second,
        # even where all other gates have underflowed to 0.
        expert1_GS = jnp.argmax(probs_GSE, axis=-1)
        chosen1_GSE = one_hot(expert1_GS, num_experts)
        expert2_GS = self._second(probs_GSE, chosen1_GSE, uniform)
        has_second_GS = valid if num_experts > 1 else jnp.zeros_like(valid)
        chosen1_GSE &= valid[..., None]
        chosen2_GSE = one_hot(expert2_GS, num_experts) & has_second_GS[..., None]

        gate_GSK = jnp.stack([select(chosen1_GSE, probs_GSE), select(chosen2_GSE, probs_GSE)], -1)
        order_GS = by_gate(gate_GSK[..., 0]) if self.order == "gate" else None
        if self.normalize == "before_drops":
            gate_GSK = normalized(gate_GSK)  # (6), (16)

        # (7)-(11). The queue grows by choices that find no slot too.
        nobody_GE = jnp.zeros_like(chosen1_GSE[:, 0], jnp.int32)
        slot1_GS, count1_GE = queue(chosen1_GSE, nobody_GE, order_GS)

        # (17) and the coin of (20): 2 * g2 > rnd, with the threshold 1/2.
        takes_second_GS = has_second_GS
        if self.second_choice == "random":
            rnd_GS = jnp.zeros_like(gate_GSK[..., 1]) if uniform is None else uniform
            takes_second_GS = has_second_GS & (gate_GSK[..., 1] > self.second_threshold * rnd_GS)

        # (18)-(22). The second queue starts at the number of first choices made, not at the number
        # that found a slot, and a choice that the coin rejects stands in it.
        ahead_GE = count1_GE if self.second_queue == "attempted" else count1_GE.clip(max=capacity)
        queues_GS = has_second_GS if self.rejected_choice == "queues" else takes_second_GS
        slot2_GS, _ = queue(chosen2_GSE & queues_GS[..., None], ahead_GE, order_GS)

        attempted_GSK = jnp.stack([valid, takes_second_GS], axis=-1)
        slot_GSK = jnp.stack([slot1_GS, slot2_GS], axis=-1)
        kept_GSK = attempted_GSK & (slot_GSK < capacity)
        weight_GSK = jnp.where(kept_GSK, gate_GSK, 0.0)
        if self.normalize == "after_drops":
            weight_GSK = normalized(weight_GSK)
        counted_GE = count1_GE
        if self.aux_counts == "all":
            counted_GE += jnp.sum(chosen2_GSE, axis=1, dtype=jnp.int32)
        return Routing(
            expert=jnp.stack([expert1_GS, expert2_GS], axis=-1),
            slot=slot_GSK,
            kept=kept_GSK,
            weight=weight_GSK,
            probs=probs_GSE,
            attempted=attempted_GSK,
            aux_loss=load_balancing_loss(probs_GSE, counted_GE, valid),  # (13)
        )

    def _second(
        self,
        probs: Float[Array, "G S E"],
        first: Bool[Array, "G S E"],
        uniform: Float[Array, "G S ..."] | None,
    ) -> Int[Array, "G S"]:
        if self.second_choice != "sampled" or uniform is None:
            return jnp.argmax(jnp.where(first, -1.0, probs), axis=-1)
        # The largest of log p + Gumbel noise is a draw from p. The mask is below all of them.
        tiny = jnp.finfo(jnp.float32).tiny
        drawn_GSE = jnp.log(jnp.maximum(probs, tiny)) + gumbel(uniform)
        return jnp.argmax(jnp.where(first, 3 * jnp.log(tiny), drawn_GSE), axis=-1)


@dataclasses.dataclass(frozen=True)
class Top1Gating(LimitedGating):
    """Route each token to its best expert: Switch Transformer, section 2.1.

    The combine weight is the softmax gate itself, not normalised, so that the router learns from
    the task loss. Tokens queue in token order; those past the capacity are dropped.

    Departures: the auxiliary loss has GShard's normalisation, (1/E) sum_e f_e P_e, so that one
    coefficient means one thing for every gating; Switch's own loss, E * sum_e f_e P_e, is E^2 times
    as large, and its alpha = 0.01 is a coefficient of 0.01 * E^2 here. Padding tokens and equal
    gates are treated as in `Top2Gating`.

    Attributes:
        order: tokens queue by "position", or by "gate", see `Top2Gating`.
        min_capacity: the fewest slots an expert has per group, however small S/E is.
        capacity_rounding: see `slots_per_expert`.
    """

    num_choices: ClassVar[int] = 1
    order: Order = "position"
    min_capacity: int = 1
    capacity_rounding: Rounding = "ceil"

    def __post_init__(self) -> None:
        """Refuse names and numbers without meaning."""
        require_one_of(self, ORDERS, "order")
        self.check_capacity_rule()

    @property
    def looks_ahead(self) -> bool:
        """By gate, a token may lose its first slot to one behind it."""
        return self.order == "gate"

    def __call__(
        self,
        logits: Float[Array, "G S E"],
        valid: Bool[Array, "G S"],
        capacity: int,
        uniform: None = None,
        bias: None = None,
    ) -> Routing:
        """Route every valid token to at most one expert.

        Args:
            logits: router outputs in any float dtype; the softmax is taken in float32.
            valid: False on padding tokens, whose logits may be anything, NaN included.
            capacity: C, slots per (group, expert).
            uniform: not used, nothing here is random.
            bias: not used.

        Returns:
            The routing, with K = 1.
        """
        del uniform, bias
        probs_GSE = masked_softmax(logits, valid)
        expert_GS = jnp.argmax(probs_GSE, axis=-1)
        chosen_GSE = one_hot(expert_GS, logits.shape[-1]) & valid[..., None]
        gate_GS = select(chosen_GSE, probs_GSE)
        nobody_GE = jnp.zeros_like(chosen_GSE[:, 0], jnp.int32)
        order_GS = by_gate(gate_GS) if self.order == "gate" else None
        slot_GS, count_GE = queue(chosen_GSE, nobody_GE, order_GS)
        kept_GS = valid & (slot_GS < capacity)
        return Routing(
            expert=expert_GS[..., None],
            slot=slot_GS[..., None],
            kept=kept_GS[..., None],
            weight=jnp.where(kept_GS, gate_GS, 0.0)[..., None],
            probs=probs_GSE,
            attempted=valid[..., None],
            aux_loss=load_balancing_loss(probs_GSE, count_GE, valid),
        )

"""Choose experts: pure functions from router logits to a `Routing`, no parameters and no mesh.

Groups are independent of one another, and nothing here is larger than [G, S, E]: the [G, S, E, C]
mask of Algorithm 2 belongs to one way of moving tokens, `dispatch.EinsumDispatch`.

Source: GShard (arXiv 2006.16668), Algorithm 1, whose line numbers the comments cite; Switch
Transformer (arXiv 2101.03961), section 2; ST-MoE (arXiv 2202.08906), equation 5.
"""

import dataclasses
import math
from fractions import Fraction
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gshard_exp.errors import SettingError


class Routing(NamedTuple):
    """Say where each token of each group goes, and with what weight it comes back.

    Gradients reach the logits through `weight`, `probs` and `aux_loss` only; the other fields are
    integers and booleans.

    Attributes:
        expert: the expert of each choice, in order of preference.
        slot: the position of the choice in that expert's buffer; meaningful only where `kept`.
        kept: the choice has a slot. A choice that is not kept contributes nothing, and a token none
            of whose choices is kept passes by the residual connection alone.
        weight: float32 combine weight, 0 where not kept.
        probs: float32 softmax gates, 0 on padding tokens.
        attempted: the choice asked for a slot: not padding, not rejected at random, and there was
            an expert to ask. So `attempted & ~kept` is what overflowed.
        aux_loss: the load-balancing loss of Algorithm 1 line (13), one per group.
    """

    expert: Int[Array, "G S K"]
    slot: Int[Array, "G S K"]
    kept: Bool[Array, "G S K"]
    weight: Float[Array, "G S K"]
    probs: Float[Array, "G S E"]
    attempted: Bool[Array, "G S K"]
    aux_loss: Float[Array, " G"]


class Gating(Protocol):
    """What the MoE layer asks of a gating function."""

    @property
    def num_choices(self) -> int:
        """K, the number of experts a token may be sent to."""
        ...

    def capacity(self, group_size: int, num_experts: int, factor: float) -> int:
        """Return C, the slots of one expert for the tokens of one group."""
        ...

    def __call__(
        self,
        logits: Float[Array, "G S E"],
        valid: Bool[Array, "G S"],
        capacity: int,
        uniform: Float[Array, "G S"] | None,
    ) -> Routing:
        """Route every valid token."""
        ...


@dataclasses.dataclass(frozen=True)
class Top2Gating:
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

    Attributes:
        min_capacity: the fewest slots an expert has per group, however small S/E is.
    """

    num_choices: ClassVar[int] = 2
    min_capacity: int = 1

    def __post_init__(self) -> None:
        _check_min_capacity(self.min_capacity)

    def capacity(self, group_size: int, num_experts: int, factor: float) -> int:
        """Return C = 2S/E * factor, see `slots_per_expert`. The paper's C has factor 1."""
        return slots_per_expert(
            self.num_choices, group_size, num_experts, factor, self.min_capacity
        )

    def __call__(
        self,
        logits: Float[Array, "G S E"],
        valid: Bool[Array, "G S"],
        capacity: int,
        uniform: Float[Array, "G S"] | None,
    ) -> Routing:
        """Route every valid token to at most two experts.

        Args:
            logits: router outputs in any float dtype; the softmax is taken in float32.
            valid: False on padding tokens, whose logits may be anything, NaN included.
            capacity: C, slots per (group, expert).
            uniform: rnd of line (17), drawn from U[0, 1) per token. The second expert is kept with
                probability 2 * g2. None is for evaluation, where the paper says nothing: rnd = 0,
                so the second expert is taken whenever there is a slot and its gate is not 0.

        Returns:
            The routing, with K = 2.
        """
        num_experts = logits.shape[-1]
        probs_GSE = masked_softmax(logits, valid)
        # (6) and (16): top2. -1 is below every gate, so a first choice is never its own second,
        # even where all other gates have underflowed to 0.
        expert1_GS = jnp.argmax(probs_GSE, axis=-1)
        chosen1_GSE = one_hot(expert1_GS, num_experts)
        expert2_GS = jnp.argmax(jnp.where(chosen1_GSE, -1.0, probs_GSE), axis=-1)
        has_second_GS = valid if num_experts > 1 else jnp.zeros_like(valid)
        chosen1_GSE &= valid[..., None]
        chosen2_GSE = one_hot(expert2_GS, num_experts) & has_second_GS[..., None]

        gate1_GS = select(chosen1_GSE, probs_GSE)
        gate2_GS = select(chosen2_GSE, probs_GSE)
        total_GS = jnp.where(valid, gate1_GS + gate2_GS, 1.0)
        weight1_GS, weight2_GS = gate1_GS / total_GS, gate2_GS / total_GS

        # (7)-(11), then (18)-(22). The second queue starts at the number of first choices made, not
        # at the number that found a slot.
        slot1_GS, count1_GE = queue(chosen1_GSE, jnp.zeros_like(chosen1_GSE[:, 0], jnp.int32))
        slot2_GS, _ = queue(chosen2_GSE, count1_GE)
        rnd_GS = jnp.zeros_like(weight2_GS) if uniform is None else uniform
        attempted_GSK = jnp.stack([valid, has_second_GS & (2 * weight2_GS > rnd_GS)], axis=-1)
        slot_GSK = jnp.stack([slot1_GS, slot2_GS], axis=-1)
        kept_GSK = attempted_GSK & (slot_GSK < capacity)
        weight_GSK = jnp.stack([weight1_GS, weight2_GS], axis=-1)
        return Routing(
            expert=jnp.stack([expert1_GS, expert2_GS], axis=-1),
            slot=slot_GSK,
            kept=kept_GSK,
            weight=jnp.where(kept_GSK, weight_GSK, 0.0),
            probs=probs_GSE,
            attempted=attempted_GSK,
            aux_loss=load_balancing_loss(probs_GSE, count1_GE, valid),  # (13)
        )


@dataclasses.dataclass(frozen=True)
class Top1Gating:
    """Route each token to its best expert: Switch Transformer, section 2.1.

    The combine weight is the softmax gate itself, not normalised, so that the router learns from
    the task loss. Tokens queue in token order; those past the capacity are dropped.

    Departures: the auxiliary loss has GShard's normalisation, (1/E) sum_e f_e P_e, so that one
    coefficient means one thing for every gating; Switch's own loss, E * sum_e f_e P_e, is E^2 times
    as large, and its alpha = 0.01 is a coefficient of 0.01 * E^2 here. Padding tokens and equal
    gates are treated as in `Top2Gating`.

    Attributes:
        min_capacity: the fewest slots an expert has per group, however small S/E is.
    """

    num_choices: ClassVar[int] = 1
    min_capacity: int = 1

    def __post_init__(self) -> None:
        _check_min_capacity(self.min_capacity)

    def capacity(self, group_size: int, num_experts: int, factor: float) -> int:
        """Return C = S/E * factor, see `slots_per_expert`. Switch's equation 3."""
        return slots_per_expert(
            self.num_choices, group_size, num_experts, factor, self.min_capacity
        )

    def __call__(
        self,
        logits: Float[Array, "G S E"],
        valid: Bool[Array, "G S"],
        capacity: int,
        uniform: Float[Array, "G S"] | None = None,
    ) -> Routing:
        """Route every valid token to at most one expert.

        Args:
            logits: router outputs in any float dtype; the softmax is taken in float32.
            valid: False on padding tokens, whose logits may be anything, NaN included.
            capacity: C, slots per (group, expert).
            uniform: not used, nothing here is random.

        Returns:
            The routing, with K = 1.
        """
        del uniform
        probs_GSE = masked_softmax(logits, valid)
        expert_GS = jnp.argmax(probs_GSE, axis=-1)
        chosen_GSE = one_hot(expert_GS, logits.shape[-1]) & valid[..., None]
        slot_GS, count_GE = queue(chosen_GSE, jnp.zeros_like(chosen_GSE[:, 0], jnp.int32))
        kept_GS = valid & (slot_GS < capacity)
        return Routing(
            expert=expert_GS[..., None],
            slot=slot_GS[..., None],
            kept=kept_GS[..., None],
            weight=jnp.where(kept_GS, select(chosen_GSE, probs_GSE), 0.0)[..., None],
            probs=probs_GSE,
            attempted=valid[..., None],
            aux_loss=load_balancing_loss(probs_GSE, count_GE, valid),
        )


def _check_min_capacity(min_capacity: int) -> None:
    if min_capacity < 1:
        raise SettingError(
            f"min_capacity={min_capacity}: an expert needs at least 1 slot per group.",
            settings=("min_capacity",),
        )


def slots_per_expert(
    num_choices: int, group_size: int, num_experts: int, factor: float, minimum: int = 1
) -> int:
    """Return C, the slots one expert has for the tokens of one group.

    C = ceil(K * S / E * factor), then at least `minimum` and at most S. A group's experts hold all
    K * S choices at factor 1 when the load is even, hence the ceiling and not the floor; no expert
    can be chosen twice by a token, hence S. The product is taken in exact arithmetic on the decimal
    that was written: 1.1 * 100 / 10 is 11, where floats give 11.000000000000002 and so 12.

    Source: the paper's C = 2S/E (section 2.2), always whole there. Departures: public code rounds
    in many ways (down, to nearest, up, up to a multiple of 4) and raises a small C to 4.

    Args:
        num_choices: K.
        group_size: S, padding included: C is a shape and cannot depend on the data.
        num_experts: E.
        factor: capacity factor, slots per choice at an even load.
        minimum: the fewest slots, where S allows.

    Raises:
        SettingError: factor is not a positive finite number, or S or E is below 1.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise SettingError(
            f"The expert capacity factor is {factor}; it must be a positive number.",
            hint="1.0 is the capacity of the paper; 1.25 to 2.0 drop fewer tokens.",
        )
    if group_size < 1 or num_experts < 1:
        raise SettingError(
            f"There is no capacity for {num_experts} experts and groups of {group_size} tokens; "
            "both numbers must be at least 1."
        )
    exact = Fraction(str(factor)) * num_choices * group_size / num_experts
    return min(max(math.ceil(exact), minimum), group_size)


def router_z_loss(logits: Float[Array, "G S E"], valid: Bool[Array, "G S"]) -> Float[Array, " G"]:
    """Return the mean over valid tokens of log(sum_e exp(logit_e))^2, per group, in float32.

    Keeps router logits small. Source: ST-MoE, equation 5. A group without valid tokens has 0.
    """
    logits_GSE = jnp.where(valid[..., None], logits.astype(jnp.float32), 0.0)
    log_z_GS = jax.nn.logsumexp(logits_GSE, axis=-1)
    total_G = jnp.sum(jnp.where(valid, jnp.square(log_z_GS), 0.0), axis=1)
    return total_G / jnp.maximum(jnp.sum(valid, axis=1), 1)


def masked_softmax(
    logits: Float[Array, "G S E"], valid: Bool[Array, "G S"]
) -> Float[Array, "G S E"]:
    """Softmax over experts in float32, 0 on padding tokens. Algorithm 1 line (2).

    Logits are masked before the softmax as well, so that NaN in a padding token stays out of the
    gradient.
    """
    logits_GSE = jnp.where(valid[..., None], logits.astype(jnp.float32), 0.0)
    return jnp.where(valid[..., None], jax.nn.softmax(logits_GSE, axis=-1), 0.0)


def one_hot(index: Int[Array, "G S"], size: int) -> Bool[Array, "G S size"]:
    """One-hot rows as booleans, four times smaller than float32 until a dtype is needed."""
    return jax.nn.one_hot(index, size, dtype=jnp.bool_)


def select(chosen: Bool[Array, "G S E"], values: Float[Array, "G S E"]) -> Float[Array, "G S"]:
    """Return the chosen expert's value per token, 0 where nothing is chosen.

    A masked sum, not a gather: its gradient is another mask, where a gather's would be a scatter.
    """
    return jnp.sum(jnp.where(chosen, values, jnp.zeros_like(values)), axis=-1)


def queue(
    chosen: Bool[Array, "G S E"], ahead: Int[Array, "G E"]
) -> tuple[Int[Array, "G S"], Int[Array, "G E"]]:
    """Queue the tokens of each group before their experts, in token order.

    Args:
        chosen: at most one expert per token.
        ahead: how many already stand before each expert.

    Returns:
        The position of each token (0 where nothing is chosen), and the number standing before each
        expert afterwards: c_e of Algorithm 1, whether or not there was a slot.
    """
    chosen_GSE = chosen.astype(jnp.int32)
    through_GSE = jnp.cumsum(chosen_GSE, axis=1, dtype=jnp.int32)
    position_GS = select(chosen, through_GSE - 1 + ahead[:, None, :])
    return position_GS, ahead + through_GSE[:, -1]


def load_balancing_loss(
    probs: Float[Array, "G S E"], count: Int[Array, "G E"], valid: Bool[Array, "G S"]
) -> Float[Array, " G"]:
    """Return (1/E) sum_e (c_e / S) m_e per group: Algorithm 1 lines (3) and (13).

    The gradient goes through the mean gates m_e; the counts c_e are constants. At an even load it
    is 1/E^2. Public code has E^2 times this, which is 1 at an even load; the coefficient in the
    configuration has to make up for that.

    Args:
        probs: gates, 0 on padding tokens.
        count: first choices per expert, overflow included.
        valid: S is the number of valid tokens of the group; a group without has loss 0.
    """
    size_G = jnp.maximum(jnp.sum(valid, axis=1), 1).astype(jnp.float32)
    mean_GE = jnp.sum(probs, axis=1) / size_G[:, None]
    fraction_GE = count.astype(jnp.float32) / size_G[:, None]
    return jnp.mean(fraction_GE * mean_GE, axis=-1)

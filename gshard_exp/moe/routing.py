"""What a gating function returns, what the layer asks of one, and the pieces that they share.

Source: GShard (arXiv 2006.16668), Algorithm 1, whose line numbers the comments cite; ST-MoE (arXiv
2202.08906), equation 5.
"""

from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gshard_exp.errors import require_at_least, require_one_of
from gshard_exp.moe.capacity import ROUNDINGS, Rounding, slots_per_expert

ORDERS = ("position", "gate")
Order = Literal["position", "gate"]


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
        aux_loss: the load-balancing loss, one per group, in the units of Algorithm 1 line (13): the
            layer multiplies it by E^2.
    """

    expert: Int[Array, "G S K"]
    slot: Int[Array, "G S K"]
    kept: Bool[Array, "G S K"]
    weight: Float[Array, "G S K"]
    probs: Float[Array, "G S E"]
    attempted: Bool[Array, "G S K"]
    aux_loss: Float[Array, " G"]


class Gating(Protocol):
    """What the MoE layer asks of a gating function.

    A function that derives from this has the answers below where it does not say otherwise.
    """

    @property
    def num_choices(self) -> int:
        """K, the number of experts that a token may be sent to; the mean where experts choose."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Which tokens are routed depends on tokens behind them by more than a full second queue.

        Such a function is refused in a decoder.
        """
        return False

    @property
    def needs_capacity(self) -> bool:
        """Without a capacity every expert would take every token."""
        return False

    @property
    def has_bias(self) -> bool:
        """The layer keeps a bias for each expert and hands it over as `bias`."""
        return False

    def noise_shape(self, num_experts: int) -> tuple[int, ...] | None:
        """Return the shape of the random numbers of one token; None asks for none."""
        del num_experts
        return None

    def capacity(self, group_size: int, num_experts: int, factor: float) -> int:
        """Return C, the slots of one expert for the tokens of one group."""
        ...

    def __call__(
        self,
        logits: Float[Array, "G S E"],
        valid: Bool[Array, "G S"],
        capacity: int,
        uniform: Float[Array, "G S ..."] | None,
        bias: Float[Array, " E"] | None = None,
    ) -> Routing:
        """Route every valid token.

        Args:
            logits: router outputs in any float dtype.
            valid: False on padding tokens, whose logits may be anything, NaN included.
            capacity: C, slots per (group, expert); S of them hold every token.
            uniform: U[0, 1) in the shape that `noise_shape` asks for; None in evaluation.
            bias: see `has_bias`.
        """
        ...


class LimitedGating(Gating):
    """A gating whose capacity follows from S, E and a factor, by two fields of its own.

    Attributes:
        min_capacity: the fewest slots an expert has per group, however small S/E is.
        capacity_rounding: see `slots_per_expert`.
    """

    min_capacity: int
    capacity_rounding: Rounding

    def capacity(self, group_size: int, num_experts: int, factor: float) -> int:
        """Return C = K * S/E * factor, see `slots_per_expert`; the paper's has K = 2, factor 1."""
        return slots_per_expert(
            self.num_choices,
            group_size,
            num_experts,
            factor,
            self.min_capacity,
            self.capacity_rounding,
        )

    def check_capacity_rule(self) -> None:
        """Refuse values without meaning of the two fields."""
        require_one_of(self, ROUNDINGS, "capacity_rounding")
        require_at_least(self, 1, "min_capacity")


def normalized(gate: Float[Array, "G S K"]) -> Float[Array, "G S K"]:
    """Divide by the sum over choices; a token without any stays 0, in its gradient as well."""
    total_GS1 = jnp.sum(gate, axis=-1, keepdims=True)
    return gate / jnp.where(total_GS1 > 0, total_GS1, 1.0)


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


def load_balancing_loss(
    probs: Float[Array, "G S E"], count: Int[Array, "G E"], valid: Bool[Array, "G S"]
) -> Float[Array, " G"]:
    """Return (1/E) sum_e (c_e / S) m_e per group: Algorithm 1 lines (3) and (13).

    The gradient goes through the mean gates m_e; the counts c_e are constants. At an even load it
    is 1/E^2. Public code has E^2 times this, which is 1 at an even load; the coefficient in the
    configuration has to make up for that.

    Args:
        probs: gates, 0 on padding tokens.
        count: first choices per expert, overflow included; second ones too where asked for.
        valid: S is the number of valid tokens of the group; a group without has loss 0.
    """
    size_G = jnp.maximum(jnp.sum(valid, axis=1), 1).astype(jnp.float32)
    mean_GE = jnp.sum(probs, axis=1) / size_G[:, None]
    fraction_GE = count.astype(jnp.float32) / size_G[:, None]
    return jnp.mean(fraction_GE * mean_GE, axis=-1)


def gumbel(uniform: Float[Array, "..."]) -> Float[Array, "..."]:
    """Turn U[0, 1) into standard Gumbel noise, -log(-log(u)), finite for u = 0 too."""
    tiny = jnp.finfo(jnp.float32).tiny
    return -jnp.log(-jnp.log(jnp.maximum(uniform, tiny)))

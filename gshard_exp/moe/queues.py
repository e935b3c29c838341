"""Give tokens positions in the queues of their experts: lines (7)-(11) and (18)-(22)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def one_hot(index: Int[Array, "G S"], size: int) -> Bool[Array, "G S size"]:
    """One-hot rows as booleans, four times smaller than float32 until a dtype is needed."""
    return jax.nn.one_hot(index, size, dtype=jnp.bool_)


def select(chosen: Bool[Array, "G S E"], values: Float[Array, "G S E"]) -> Float[Array, "G S"]:
    """Return the chosen expert's value per token, 0 where nothing is chosen.

    A masked sum, not a gather: its gradient is another mask, where a gather's would be a scatter.
    """
    return jnp.sum(jnp.where(chosen, values, jnp.zeros_like(values)), axis=-1)


def queue(
    chosen: Bool[Array, "G S E"],
    ahead: Int[Array, "G E"],
    order: Int[Array, "G S"] | None = None,
) -> tuple[Int[Array, "G S"], Int[Array, "G E"]]:
    """Queue the tokens of each group before their experts.

    Args:
        chosen: at most one expert per token.
        ahead: how many already stand before each expert.
        order: the tokens of each group in the order in which they queue, see `by_gate`. None is
            token order, the paper's.

    Returns:
        The position of each token (0 where nothing is chosen), and the number standing before each
        expert afterwards: c_e of Algorithm 1, whether or not there was a slot.
    """
    chosen_GSE = chosen.astype(jnp.int32)
    if order is not None:
        chosen_GSE = jnp.take_along_axis(chosen_GSE, order[..., None], axis=1)
    through_GSE = jnp.cumsum(chosen_GSE, axis=1, dtype=jnp.int32)
    last_GE = through_GSE[:, -1]
    if order is not None:
        back_GS = jnp.argsort(order, axis=1)  # the place of each token in that order
        through_GSE = jnp.take_along_axis(through_GSE, back_GS[..., None], axis=1)
    position_GS = select(chosen, through_GSE - 1 + ahead[:, None, :])
    return position_GS, ahead + last_GE


def queue_in_turn(
    expert: Int[Array, "G S K"],
    valid: Bool[Array, "G S"],
    num_experts: int,
    order: Int[Array, "G S"] | None = None,
) -> tuple[Int[Array, "G S K"], Int[Array, "G E"]]:
    """Queue all first choices, then all second choices behind them, and so on.

    Returns:
        The positions, and the number standing before each expert: all choices of valid tokens.
    """
    slots = []
    ahead_GE = jnp.zeros((expert.shape[0], num_experts), jnp.int32)
    for choice in range(expert.shape[-1]):
        chosen_GSE = one_hot(expert[..., choice], num_experts) & valid[..., None]
        slot_GS, ahead_GE = queue(chosen_GSE, ahead_GE, order)
        slots.append(slot_GS)
    return jnp.stack(slots, axis=-1), ahead_GE


def by_gate(gate: Float[Array, "G S"]) -> Int[Array, "G S"]:
    """Return the tokens of each group by descending gate, equals in token order.

    Batch-prioritised order: where slots are short, the router's surest choices get them. Source:
    V-MoE (arXiv 2106.05974), section 4.1.
    """
    gate_GS = jax.lax.stop_gradient(gate)  # an order has no gradient
    return jnp.argsort(-gate_GS, axis=1, stable=True).astype(jnp.int32)

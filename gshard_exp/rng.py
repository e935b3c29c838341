"""Random numbers keyed by what they are for, never by where they are computed.

A key stands for (seed, step, layer, use); a row's numbers come from that key folded with the
row's index in the global batch. A microbatch, a scan over layers, a recomputation or another
mesh therefore draws the numbers that the whole batch, a loop, the first computation or one
device would have drawn.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def row_uniform(
    key: Key[Array, ""], rows: Int[Array, " B"], row_shape: tuple[int, ...]
) -> Float[Array, "B ..."]:
    """Draw U[0, 1) for each row of a batch.

    Args:
        key: one key for (seed, step, layer, use).
        rows: index of each row in the global batch.
        row_shape: shape of one row's numbers.

    Returns:
        float32 of shape `(len(rows), *row_shape)`, in [0, 1).
    """

    def one_row(row: Int[Array, ""]) -> Float[Array, "..."]:
        # Drawn flat: one counter per number, so that the shape of the row does not matter.
        flat = jax.random.uniform(jax.random.fold_in(key, row), (math.prod(row_shape),))
        return flat.reshape(row_shape)

    return jax.vmap(one_row)(rows)


def row_dropout(
    x: Float[Array, "B ..."], rate: float, key: Key[Array, ""], rows: Int[Array, " B"]
) -> Float[Array, "B ..."]:
    """Zero each element with probability `rate`; scale the others by 1 / (1 - rate)."""
    keep = row_uniform(key, rows, x.shape[1:]) >= rate
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))

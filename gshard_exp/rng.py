"""Random numbers keyed by what they are for, never by where they are computed.

A key stands for (seed, step, layer, use); a row's numbers come from that key folded with the
row's index in the global batch. A microbatch, a scan over layers, a recomputation or another
mesh therefore draws the numbers that the whole batch, a loop, the first computation or one
device would have drawn.
"""

import math

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, Key, UInt16


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
    """Zero each element with probability `rate`; scale the others by 1 / (1 - rate).

    The rate is rounded to a multiple of 2^-16. Four elements share one Threefry block of 64 bits;
    `jax.random.uniform` spends a block on each, which costs a CPU a fifth of a small train step.

    Args:
        x: rows, in any float dtype.
        rate: in [0, 1), a Python number.
        key: one key for (seed, step, layer, use).
        rows: index of each row in the global batch.
    """
    threshold = round(rate * 2**16)
    if threshold == 0:
        return x
    keep = _row_bits16(key, rows, x.shape[1:]) >= threshold
    return jnp.where(keep, x / (1.0 - threshold / 2**16), jnp.zeros_like(x))


def _row_bits16(
    key: Key[Array, ""], rows: Int[Array, " B"], row_shape: tuple[int, ...]
) -> UInt16[Array, "B ..."]:
    """Hash (row, 0), (row, 1), ... with a key; each hash gives four 16-bit numbers.

    The four go to the four quarters of the last axis but one (the only one, if there is no other).
    Not to neighbours of the last axis: a TPU would lay the four out on an axis of their own and pad
    it to 128 lanes, which takes longer than the rest of an attention layer.

    The primitive itself, not `threefry_2x32` with a key for each row: one elementwise operation
    that a mesh splits by rows, where keys of rows would be one more hash each.
    """
    split = max(len(row_shape) - 2, 0)
    quarter = list(row_shape)
    quarter[split] = math.ceil(row_shape[split] / 4)
    shape = (len(rows), *quarter)
    blocks = jnp.arange(math.prod(quarter), dtype=jnp.uint32).reshape(1, *quarter)
    row_of = rows.astype(jnp.uint32).reshape(-1, *(1,) * len(quarter))
    key_data = jax.random.key_data(key)
    words = threefry2x32_p.bind(
        key_data[0], key_data[1], jnp.broadcast_to(row_of, shape), jnp.broadcast_to(blocks, shape)
    )
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    bits = jnp.concatenate([half.astype(jnp.uint16) for half in halves], axis=1 + split)
    return jax.lax.slice_in_dim(bits, 0, row_shape[split], axis=1 + split)

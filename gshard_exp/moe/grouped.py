"""Multiply rows that are sorted by expert with the weights of their experts, without buffers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Rows of a tile: enough to make a product of it, not more than an expert has. Fastest of 4 to 256
# on CPU at 16 to 4096 rows and 16 to 128 experts, or within a fifth of it.
_FEWEST, _MOST = 8, 128


def grouped_dot(
    x: Float[Array, "R M"], w: Float[Array, "E M H"], sizes: Int[Array, " E"]
) -> Float[Array, "R H"]:
    """Return x[r] @ w[e] for each row r of expert e, and 0 for the rows after the last expert's.

    `jax.lax.ragged_dot`, whose lowering for CPU multiplies every row with every expert, E times the
    work: there a loop goes over tiles of rows of one expert, and never reads an expert without
    rows.

    Args:
        x: rows of expert 0, then those of expert 1, and so on; then rows of nobody.
        w: of the same dtype.
        sizes: rows of each expert; their sum is at most R.
    """
    return jax.lax.platform_dependent(x, w, sizes, cpu=_tiled_dot, default=jax.lax.ragged_dot)


@jax.custom_vjp
def _tiled_dot(
    x_RM: Float[Array, "R M"], w_EMH: Float[Array, "E M H"], sizes_E: Int[Array, " E"]
) -> Float[Array, "R H"]:
    return _multiply_tiles(x_RM, w_EMH, sizes_E, contract=0)


def _forward(x_RM, w_EMH, sizes_E):
    return _tiled_dot(x_RM, w_EMH, sizes_E), (x_RM, w_EMH, sizes_E)


def _backward(saved, dy_RH):
    # A loop of unknown length has no gradient of JAX's own.
    x_RM, w_EMH, sizes_E = saved
    dx_RM = _multiply_tiles(dy_RH, w_EMH, sizes_E, contract=1)
    return dx_RM, _sum_outer_products(x_RM, dy_RH, sizes_E).astype(w_EMH.dtype), None


_tiled_dot.defvjp(_forward, _backward)


class _Tiles(NamedTuple):
    """Runs of rows of one expert each, in the order of the rows; those after `count` are nothing.

    Attributes:
        size: rows of a tile; the last of an expert runs over into the rows that follow.
        count: number of tiles.
        expert: whose rows.
        start: first row.
        rows: rows of that expert, at most `size`.
    """

    size: int
    count: Int[Array, ""]
    expert: Int[Array, " tiles"]
    start: Int[Array, " tiles"]
    rows: Int[Array, " tiles"]


def _tiles(sizes_E: Int[Array, " E"], num_rows: int) -> _Tiles:
    num_experts = sizes_E.shape[0]
    mean = -(-num_rows // num_experts)
    size = min(max(1 << (mean - 1).bit_length(), _FEWEST), _MOST)
    first_E = jnp.cumsum(sizes_E) - sizes_E
    tiles_E = -(-sizes_E // size)
    end_E = jnp.cumsum(tiles_E)
    tile = jnp.arange(num_rows // size + num_experts)
    expert = jnp.searchsorted(end_E, tile, side="right").clip(max=num_experts - 1)
    start = first_E[expert] + (tile - (end_E - tiles_E)[expert]) * size
    rows = jnp.minimum(first_E[expert] + sizes_E[expert] - start, size)
    return _Tiles(size, end_E[-1], expert, start, rows)


def _multiply_tiles(x_RM, w_EMH, sizes_E, *, contract: int):
    """Multiply with w[e], contracted over its axis `contract`."""
    num_rows = x_RM.shape[0]
    tiles = _tiles(sizes_E, num_rows)
    x_RM = _run_over(x_RM, tiles.size)
    dimensions = (((1,), (contract,)), ((), ()))

    def multiply(tile, y_RH):
        start = tiles.start[tile]
        x_tM = jax.lax.dynamic_slice_in_dim(x_RM, start, tiles.size)
        w_MH = jax.lax.dynamic_index_in_dim(w_EMH, tiles.expert[tile], keepdims=False)
        y_tH = jax.lax.dot_general(x_tM, w_MH, dimensions)
        # What runs over is wrong until the next expert's tile overwrites it.
        return jax.lax.dynamic_update_slice_in_dim(y_RH, y_tH, start, axis=0)

    y_RH = jnp.zeros((x_RM.shape[0], w_EMH.shape[2 - contract]), x_RM.dtype)
    y_RH = jax.lax.fori_loop(0, tiles.count, multiply, y_RH)[:num_rows]
    return jnp.where((jnp.arange(num_rows) < jnp.sum(sizes_E))[:, None], y_RH, 0)


def _sum_outer_products(x_RM, dy_RH, sizes_E):
    """Return sum over the rows of each expert of x^T dy, in float32."""
    tiles = _tiles(sizes_E, x_RM.shape[0])
    x_RM, dy_RH = _run_over(x_RM, tiles.size), _run_over(dy_RH, tiles.size)

    def add(tile, dw_EMH):
        start, expert = tiles.start[tile], tiles.expert[tile]
        own_t1 = (jnp.arange(tiles.size) < tiles.rows[tile])[:, None]
        x_tM, dy_tH = (
            jnp.where(own_t1, jax.lax.dynamic_slice_in_dim(rows, start, tiles.size), 0)
            for rows in (x_RM, dy_RH)
        )
        product_MH = jax.lax.dot_general(
            x_tM, dy_tH, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        before_MH = jax.lax.dynamic_index_in_dim(dw_EMH, expert, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw_EMH, before_MH + product_MH, expert, 0)

    zero_EMH = jnp.zeros((sizes_E.shape[0], x_RM.shape[1], dy_RH.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, tiles.count, add, zero_EMH)


def _run_over(rows_RM, size: int):
    """Add rows for the last tile to run over into."""
    return jnp.pad(rows_RM, [(0, size), (0, 0)])

"""Multiply rows that are sorted by expert with the weights of their experts, without buffers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Rows of a tile, at least and at most. A product of CPU reads the weights from memory and then
# multiplies, whatever its size: a tile should hold all rows of an expert, and hardly more.
_FEWEST, _MOST = 4, 128


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
    """Runs of rows of one expert each; those after `count` are nothing.

    Attributes:
        size: rows of a tile; one that an expert does not fill runs over into the rows that follow.
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

    def own(self, tile: Int[Array, ""]) -> Bool[Array, "size 1"]:
        """Mark the rows of a tile that are its expert's."""
        return (jnp.arange(self.size) < self.rows[tile])[:, None]


def _sizes(mean: int) -> list[int]:
    """Return sizes of tiles for experts that have `mean` rows on average, in ascending order."""
    base = min(max(1 << (mean - 1).bit_length(), 2 * _FEWEST), _MOST)
    around = (base // 4, base // 2, 3 * base // 4, base, 3 * base // 2, 2 * base)
    return sorted({size for size in around if _FEWEST <= size <= _MOST and size % _FEWEST == 0})


def _tiles(sizes_E: Int[Array, " E"], num_rows: int) -> list[_Tiles]:
    """Cut the rows of each expert into tiles of the largest size, and what is left into one more.

    That one is of the smallest size that holds it. With tiles of one size, that of the mean, every
    second expert would need another tile for few rows, and its weights a second time.
    """
    num_experts = sizes_E.shape[0]
    sizes = _sizes(-(-num_rows // num_experts))
    first_E = jnp.cumsum(sizes_E) - sizes_E
    full_E = sizes_E // sizes[-1]
    left_E = sizes_E - full_E * sizes[-1]
    found = []
    for size, smaller in zip(sizes, [0, *sizes], strict=False):
        tiles_E = ((left_E > smaller) & (left_E <= size)).astype(jnp.int32)
        begin_E = first_E + full_E * sizes[-1]
        if size == sizes[-1]:
            tiles_E, begin_E = full_E + tiles_E, first_E
        end_E = jnp.cumsum(tiles_E)
        tile = jnp.arange(num_experts + (num_rows // size if size == sizes[-1] else 0))
        expert = jnp.searchsorted(end_E, tile, side="right").clip(max=num_experts - 1)
        start = begin_E[expert] + (tile - (end_E - tiles_E)[expert]) * size
        rows = jnp.minimum(first_E[expert] + sizes_E[expert] - start, size)
        found.append(_Tiles(size, end_E[-1], expert, start, rows))
    return found


def _multiply_tiles(x_RM, w_EMH, sizes_E, *, contract: int):
    """Multiply with w[e], contracted over its axis `contract`."""
    num_rows = x_RM.shape[0]
    of_sizes = _tiles(sizes_E, num_rows)
    x_RM = _run_over(x_RM, of_sizes[-1].size)
    dimensions = (((1,), (contract,)), ((), ()))
    y_RH = jnp.zeros((x_RM.shape[0], w_EMH.shape[2 - contract]), x_RM.dtype)
    for tiles in of_sizes:

        def multiply(tile, y_RH, tiles=tiles):
            start = tiles.start[tile]
            x_tM = jax.lax.dynamic_slice_in_dim(x_RM, start, tiles.size)
            w_MH = jax.lax.dynamic_index_in_dim(w_EMH, tiles.expert[tile], keepdims=False)
            y_tH = jax.lax.dot_general(x_tM, w_MH, dimensions)
            before_tH = jax.lax.dynamic_slice_in_dim(y_RH, start, tiles.size)
            y_tH = jnp.where(tiles.own(tile), y_tH, before_tH)
            return jax.lax.dynamic_update_slice_in_dim(y_RH, y_tH, start, axis=0)

        y_RH = jax.lax.fori_loop(0, tiles.count, multiply, y_RH)
    return y_RH[:num_rows]


def _sum_outer_products(x_RM, dy_RH, sizes_E):
    """Return sum over the rows of each expert of x^T dy, in float32."""
    of_sizes = _tiles(sizes_E, x_RM.shape[0])
    x_RM, dy_RH = (_run_over(rows, of_sizes[-1].size) for rows in (x_RM, dy_RH))
    dw_EMH = jnp.zeros((sizes_E.shape[0], x_RM.shape[1], dy_RH.shape[1]), jnp.float32)
    for tiles in of_sizes:

        def add(tile, dw_EMH, tiles=tiles):
            start, expert = tiles.start[tile], tiles.expert[tile]
            x_tM, dy_tH = (
                jnp.where(tiles.own(tile), jax.lax.dynamic_slice_in_dim(rows, start, tiles.size), 0)
                for rows in (x_RM, dy_RH)
            )
            product_MH = jax.lax.dot_general(
                x_tM, dy_tH, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            before_MH = jax.lax.dynamic_index_in_dim(dw_EMH, expert, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(dw_EMH, before_MH + product_MH, expert, 0)

        dw_EMH = jax.lax.fori_loop(0, tiles.count, add, dw_EMH)
    return dw_EMH


def _run_over(rows_RM, size: int):
    """Add rows for the last tile to run over into."""
    return jnp.pad(rows_RM, [(0, size), (0, 0)])

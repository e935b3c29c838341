"""Marks what the backward pass should find again under the policy `products`.

Marked is what takes long to compute for its size: products with weights, what is sent between
devices. See `model.transformer.REMAT_POLICIES`; under other policies a mark changes nothing.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

KEPT = "kept"


def kept(x: Array) -> Array:
    """Mark a value; its shape, dtype and gradient stay."""
    return checkpoint_name(x, KEPT)


@jax.custom_jvp
def relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return max(x, 0), whose gradient at 0 is 0.

    `jax.nn.relu`, but that marked are the result and one byte for the sign. Its own gradient reads
    x, which on TPU is kept in float32 where the result, an operand of a product, takes bfloat16.
    """
    return jnp.maximum(x, 0)


@relu.defjvp
def _(primals, tangents):
    (x,), (tangent,) = primals, tangents
    positive = kept(x > 0)
    return kept(jnp.maximum(x, 0)), jnp.where(positive, tangent, jnp.zeros_like(tangent))

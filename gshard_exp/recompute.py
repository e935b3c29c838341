"""What the backward pass finds again, and what it computes again.

Marked for the policy `products` is what takes long to compute for its size: products with weights,
what is sent between devices. Under other policies a mark changes nothing.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

KEPT = "kept"

# What of one repetition's forward pass is kept for its backward pass; the rest is computed again.
REMAT_POLICIES = {
    # Keep everything: no recomputation.
    "none": None,
    # Keep the results of matrix products without a batch dimension: projections, dense layers.
    "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    # Keep products with weights, routers' scores and what experts are sent. Norms, attention
    # weights, dropout and the masks of dispatch are computed again: most of the memory for little
    # of the time.
    "products": jax.checkpoint_policies.save_only_these_names(KEPT),
    # Keep the results of all matrix products.
    "dots": jax.checkpoint_policies.dots_saveable,
    # Keep only the input of each repetition (the paper recomputes from 36 layers on).
    "full": jax.checkpoint_policies.nothing_saveable,
}


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

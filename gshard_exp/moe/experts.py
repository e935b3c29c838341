"""The experts of a layer: their weights, and the two layouts of tokens that they compute."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gshard_exp import axes
from gshard_exp.moe.grouped import grouped_dot
from gshard_exp.recompute import kept, relu
from gshard_exp.sharding.annotate import constrain


class Experts(NamedTuple):
    """Feed-forward layers without biases, relu between; they compute in the dtype of the tokens.

    Attributes:
        wi: input weights, float32.
        wo: output weights, float32.
    """

    wi: Float[Array, "E M H"]
    wo: Float[Array, "E H M"]

    def of_buffers(self, x: Float[Array, "G E C M"]) -> Float[Array, "G E C M"]:
        """Compute tokens in the slots of their experts, all-to-all there and back."""
        x_EGCM = _to_experts(x)
        # One axis R for the slots of all groups: one matrix product per expert. A TPU would pad a
        # C of 1 or 2 to 8 sublanes, and CPUs multiply and transpose flat matrices faster.
        num_experts, groups, capacity, width = x_EGCM.shape
        x_ERM = kept(x_EGCM.reshape(num_experts, groups * capacity, width))
        with jax.named_scope("experts"):
            h_ERH = relu(jnp.einsum("ERM,EMH->ERH", x_ERM, self.wi.astype(x.dtype)))
            h_ERH = constrain(h_ERH, axes.EXPERT, axes.EXPERT_GROUP, axes.ACTIVATION_MLP)
            y_ERM = jnp.einsum("ERH,EHM->ERM", h_ERH, self.wo.astype(x.dtype))
        return kept(_from_experts(y_ERM.reshape(x_EGCM.shape)))

    @jax.named_scope("experts")
    def of_rows(self, x: Float[Array, "R M"], sizes: Int[Array, " E"]) -> Float[Array, "R M"]:
        """Compute rows that are sorted by expert, `sizes` of each; 0 for rows of nobody."""
        x_RM = kept(x)
        h_RH = relu(grouped_dot(x_RM, self.wi.astype(x.dtype), sizes))
        return kept(grouped_dot(h_RH, self.wo.astype(x.dtype), sizes))


# The constraints on BOTH sides of each transposition make it one all-to-all; with one side alone
# the partitioner replicates the whole [E, G, C, M] array. The scopes' names,
# here and around the products, reach the census and the plans.
@jax.named_scope("dispatch")
def _to_experts(x_GECM: Float[Array, "G E C M"]) -> Float[Array, "E G C M"]:
    x_GECM = constrain(x_GECM, axes.GROUP, None, axes.CAPACITY, axes.ACTIVATION_EMBED)
    x_EGCM = jnp.swapaxes(x_GECM, 0, 1)
    return constrain(x_EGCM, axes.EXPERT, axes.EXPERT_GROUP, axes.CAPACITY, axes.ACTIVATION_EMBED)


@jax.named_scope("combine")
def _from_experts(x_EGCM: Float[Array, "E G C M"]) -> Float[Array, "G E C M"]:
    x_EGCM = constrain(x_EGCM, axes.EXPERT, axes.EXPERT_GROUP, axes.CAPACITY, axes.ACTIVATION_EMBED)
    x_GECM = jnp.swapaxes(x_EGCM, 0, 1)
    return constrain(x_GECM, axes.GROUP, None, axes.CAPACITY, axes.ACTIVATION_EMBED)

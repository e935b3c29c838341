"""Dropless dispatch: tokens sorted by expert, no buffers and so no capacity."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gshard_exp import axes
from gshard_exp.moe.experts import Experts
from gshard_exp.moe.routing import Routing
from gshard_exp.sharding.manual import sum_over_devices


@dataclasses.dataclass(frozen=True)
class RaggedDispatch:
    """Sort the choices of all tokens by expert and let each expert compute the rows it got.

    Without capacity nothing is dropped and nothing is padded: a token's output does not depend on
    its neighbours. With one, the choices that have a slot are computed, as by the other methods.

    On a mesh no token goes to another data partition. The experts of an expert partition see all
    tokens of their data partition (an all-gather over the expert axis), compute those that chose
    them, and results are summed over the partitions. With buffers an all-to-all moves K/E of that;
    it cannot be sized without a capacity.

    Source: MegaBlocks (arXiv 2211.15841), "dropless MoE"; AI-Hypercomputer/maxtext,
    src/maxtext/layers/moe.py (sparse_matmul), for the use of `jax.lax.ragged_dot`.
    """

    def __call__(
        self,
        x: Float[Array, "G S M"],
        routing: Routing,
        experts: Experts,
        capacity: int | None = None,
    ) -> Float[Array, "G S M"]:
        """Return each token the weighted sum of its experts; 0 where it has none."""
        del capacity
        of_choices = (axes.EXPERT_GROUP, None, None)
        numbers_E = jnp.arange(experts.wi.shape[0], dtype=jnp.int32)
        y_GSM = sum_over_devices(
            _compute,
            {
                "tokens": (x, of_choices),
                "choices": (routing.expert, of_choices),
                "kept choices": (routing.kept, of_choices),
                "weights": (routing.weight, of_choices),
                "experts": (numbers_E, (axes.EXPERT,)),
                "wi": (experts.wi, (axes.EXPERT, None, axes.EXPERT_MLP)),
                "wo": (experts.wo, (axes.EXPERT, axes.EXPERT_MLP, None)),
            },
            result=of_choices,
            over=(axes.EXPERT, axes.EXPERT_MLP),
        )
        return y_GSM.astype(x.dtype)


def _compute(
    x_GSM: Float[Array, "G S M"],
    expert_GSK: Int[Array, "G S K"],
    kept_GSK: Bool[Array, "G S K"],
    weight_GSK: Float[Array, "G S K"],
    own_E: Int[Array, " E"],
    wi_EMH: Float[Array, "E M H"],
    wo_EHM: Float[Array, "E H M"],
) -> Float[Array, "G S M"]:
    """Compute what the experts at hand, which are consecutive, add to each token, in float32."""
    num_experts, num_choices, width = own_E.shape[0], expert_GSK.shape[-1], x_GSM.shape[-1]
    local_GSK = expert_GSK - own_E[0]
    own_GSK = kept_GSK & (local_GSK >= 0) & (local_GSK < num_experts)
    # Choices of other experts, and of none, are sorted to the end.
    local_R = jnp.where(own_GSK, local_GSK, num_experts).reshape(-1)
    order_R = jnp.argsort(local_R, stable=True)  # the choice that each row is of
    place_R = jnp.argsort(order_R)  # the row of each choice
    ends_E = jnp.searchsorted(local_R[order_R], jnp.arange(num_experts), side="right")
    sizes_E = jnp.diff(ends_E, prepend=0).astype(jnp.int32)

    x_GSKM = jnp.broadcast_to(x_GSM[:, :, None, :], (*expert_GSK.shape, width))
    x_RM = _permute(x_GSKM.reshape(-1, width), order_R, place_R)
    y_RM = _permute(Experts(wi_EMH, wo_EHM).of_rows(x_RM, sizes_E), place_R, order_R)
    # Weights are rounded and summed in float32, as by the other methods.
    y_GSKM = y_RM.reshape(*expert_GSK.shape, width).astype(jnp.float32)
    weight_GSK = jnp.where(own_GSK, weight_GSK, 0.0).astype(x_GSM.dtype).astype(jnp.float32)
    y_GSM = jnp.zeros(x_GSM.shape, jnp.float32)
    for choice in range(num_choices):
        y_GSM += weight_GSK[..., choice, None] * y_GSKM[..., choice, :]
    return y_GSM


@jax.custom_vjp
def _permute(
    rows_RM: Float[Array, "R M"], order_R: Int[Array, " R"], place_R: Int[Array, " R"]
) -> Float[Array, "R M"]:
    """Return rows[order]; `place` is the inverse of `order`.

    JAX does not know that `order` is a permutation, and takes a scatter for its gradient.
    """
    del place_R
    return rows_RM[order_R]


def _permute_forward(rows_RM, order_R, place_R):
    return _permute(rows_RM, order_R, place_R), place_R


def _permute_backward(place_R, of_rows_RM):
    return of_rows_RM[place_R], None, None


_permute.defvjp(_permute_forward, _permute_backward)

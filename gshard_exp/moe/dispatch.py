"""Move tokens into the buffers of their experts and back, as einsums or by row index.

All methods do the same thing to 1e-5, in value and gradient (`gather.GatherDispatch` is the third
with buffers). These work within a group, so a mesh
that splits the groups has nothing to communicate here; the all-to-all is that of
`Experts.of_buffers`, between x_GECM and x_EGCM. `ragged.RaggedDispatch` has no buffers.

A slot of a group is numbered by one integer, expert * C + slot, on a flat axis X = E * C. With E
and C as two axes a TPU would pad the last one, C = 1..4 at E = 2048, to 128 lanes.

Source: GShard (arXiv 2006.16668), Algorithm 2.
"""

import abc
import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gshard_exp.moe.experts import Experts
from gshard_exp.moe.routing import Routing


class Dispatch(Protocol):
    """What the MoE layer asks of a way of bringing tokens to their experts and back."""

    def __call__(
        self, x: Float[Array, "G S M"], routing: Routing, experts: Experts, capacity: int
    ) -> Float[Array, "G S M"]:
        """Return each token the weighted sum of its experts; 0 where no expert holds it."""
        ...


class BufferedDispatch(abc.ABC):
    """Experts compute buffers of `capacity` slots for each group."""

    def __call__(
        self, x: Float[Array, "G S M"], routing: Routing, experts: Experts, capacity: int
    ) -> Float[Array, "G S M"]:
        """Return each token the weighted sum of its experts; 0 where no expert holds it."""
        sent_GECM = self.dispatch(x, routing, experts.wi.shape[0], capacity)
        return self.combine(experts.of_buffers(sent_GECM), routing)

    @abc.abstractmethod
    def dispatch(
        self, x: Float[Array, "G S M"], routing: Routing, num_experts: int, capacity: int
    ) -> Float[Array, "G E C M"]:
        """Copy each token into the slots it was given; slots of nobody are 0."""

    @abc.abstractmethod
    def combine(self, y: Float[Array, "G E C M"], routing: Routing) -> Float[Array, "G S M"]:
        """Return each token the weighted sum of its slots; 0 where it has none."""


@dataclasses.dataclass(frozen=True)
class EinsumDispatch(BufferedDispatch):
    """Move tokens by multiplying with a one-hot matrix, as Algorithm 2 does.

    Takes 2 * G * S * E * C * M multiply-adds for a mask of G * S * E * C elements in the dtype of
    the activations: on a matrix unit the cheaper way while S is small, and the most expensive part
    of the layer when it is not, for E * C grows with S.

    Departures: the mask has one axis X where the paper has E and C. Combine weights are rounded to
    the dtype of the activations, as in the paper's own einsum.

    Attributes:
        precision: of the einsums, by name ("highest"); None follows JAX's default, which on TPU and
            on some GPUs rounds float32 inputs, here as in every other product of the model.
    """

    precision: str | None = None

    def dispatch(
        self, x: Float[Array, "G S M"], routing: Routing, num_experts: int, capacity: int
    ) -> Float[Array, "G E C M"]:
        """Copy each token into the slots it was given; slots of nobody are 0."""
        num_groups, _, width = x.shape
        flat_GSK = flat_slot(routing, num_experts, capacity)
        mask_GSX = sum_over_choices(
            flat_GSK, jnp.ones_like(flat_GSK, x.dtype), num_experts * capacity
        )
        x_GXM = jnp.einsum("GSX,GSM->GXM", mask_GSX, x, precision=self.precision)
        return x_GXM.reshape(num_groups, num_experts, capacity, width)

    def combine(self, y: Float[Array, "G E C M"], routing: Routing) -> Float[Array, "G S M"]:
        """Return each token the weighted sum of its slots; 0 where it has none."""
        num_groups, num_experts, capacity, width = y.shape
        flat_GSK = flat_slot(routing, num_experts, capacity)
        y_GXM = y.reshape(num_groups, num_experts * capacity, width)
        combine_GSX = sum_over_choices(
            flat_GSK, routing.weight.astype(y.dtype), num_experts * capacity
        )
        return jnp.einsum("GSX,GXM->GSM", combine_GSX, y_GXM, precision=self.precision)


@dataclasses.dataclass(frozen=True)
class ScatterDispatch(BufferedDispatch):
    """Move tokens by row index: a scatter into the buffers, a gather out of them.

    Takes no arithmetic to speak of and no memory beyond the buffers and one copy of the tokens per
    choice, so its cost does not grow with S, E or C for a given number of tokens.
    """

    def dispatch(
        self, x: Float[Array, "G S M"], routing: Routing, num_experts: int, capacity: int
    ) -> Float[Array, "G E C M"]:
        """Copy each token into the slots it was given; slots of nobody are 0."""
        num_groups, _, width = x.shape
        flat_GSK = flat_slot(routing, num_experts, capacity)
        x_GXM = jnp.zeros((num_groups, num_experts * capacity, width), x.dtype)
        for choice in range(flat_GSK.shape[-1]):
            x_GXM = jax.vmap(_scatter_rows)(x_GXM, flat_GSK[..., choice], x)
        return x_GXM.reshape(num_groups, num_experts, capacity, width)

    def combine(self, y: Float[Array, "G E C M"], routing: Routing) -> Float[Array, "G S M"]:
        """Return each token the weighted sum of its slots; 0 where it has none."""
        num_groups, num_experts, capacity, width = y.shape
        flat_GSK = flat_slot(routing, num_experts, capacity)
        y_GXM = y.reshape(num_groups, num_experts * capacity, width)
        # Rounded, then summed in float32: what a matrix unit does in EinsumDispatch.
        weight_GSK = routing.weight.astype(y.dtype).astype(jnp.float32)
        total_GSM = jnp.zeros((*flat_GSK.shape[:2], width), jnp.float32)
        for choice in range(flat_GSK.shape[-1]):
            rows_GSM = jax.vmap(_gather_rows)(y_GXM, flat_GSK[..., choice])
            total_GSM += weight_GSK[..., choice, None] * rows_GSM.astype(jnp.float32)
        return total_GSM.astype(y.dtype)


def flat_slot(routing: Routing, num_experts: int, capacity: int) -> Int[Array, "G S K"]:
    """Return expert * C + slot of each choice, and past the end, E * C + s, where it is not kept.

    Within a group no two choices of one rank have the same number, those not kept included: the
    scatter and the gather promise so.
    """
    num_slots = num_experts * capacity
    nowhere_S = num_slots + jnp.arange(routing.slot.shape[1], dtype=routing.slot.dtype)
    return jnp.where(
        routing.kept, routing.expert * capacity + routing.slot, nowhere_S[None, :, None]
    )


def sum_over_choices(
    flat: Int[Array, "G S K"], value: Float[Array, "G S K"], num_slots: int
) -> Float[Array, "G S X"]:
    """Return the matrix of each group that has `value` at (token, slot), and 0 elsewhere."""
    zero = jnp.zeros((), value.dtype)
    # A select, not a product with the one-hot: its gradient is a select too, and rounds nothing.
    parts_GSX = [
        jnp.where(
            jax.nn.one_hot(flat[..., choice], num_slots, dtype=jnp.bool_),
            value[..., choice, None],
            zero,
        )
        for choice in range(flat.shape[-1])
    ]
    return sum(parts_GSX[1:], parts_GSX[0])


def _scatter_rows(
    buffer_XM: Float[Array, "X M"], index_S: Int[Array, " S"], rows_SM: Float[Array, "S M"]
) -> Float[Array, "X M"]:
    # Slots start at 0 and are given once, so adding is setting; the gradient of `add` is one
    # gather, that of `set` is not.
    return buffer_XM.at[index_S].add(rows_SM, mode="drop", unique_indices=True)


def _gather_rows(buffer_XM: Float[Array, "X M"], index_S: Int[Array, " S"]) -> Float[Array, "S M"]:
    return buffer_XM.at[index_S].get(mode="fill", fill_value=0, unique_indices=True)

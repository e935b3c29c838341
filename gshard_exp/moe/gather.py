"""Dispatch as a gather that is local to each device: the paper's program that is partly manual."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gshard_exp import axes
from gshard_exp.moe.dispatch import BufferedDispatch, flat_slot
from gshard_exp.moe.routing import Routing
from gshard_exp.sharding.manual import manual

_TOKENS = (axes.GROUP, None, axes.ACTIVATION_EMBED)
_INDICES = (axes.GROUP, None, None)


@dataclasses.dataclass(frozen=True)
class GatherDispatch(BufferedDispatch):
    """Let each slot fetch its token, and each choice its slot, on the device of their group.

    Gathers in both directions and for both gradients: rows are read from where they are and never
    added up in place. The one scatter inverts the slot numbers, G * S * K integers. Along the mesh
    axes of the groups it is manual, so nothing of it is communicated whatever the partitioner can
    prove of the indices; along the others it is split as the values around it are.

    Source: section 3.2, "mixing manual and automatic sharding". Departures: the paper gathers into
    the slots only; it has axes E and C where X = E * C is one here (see `dispatch`).
    """

    def dispatch(
        self, x: Float[Array, "G S M"], routing: Routing, num_experts: int, capacity: int
    ) -> Float[Array, "G E C M"]:
        """Copy each token into the slots it was given; slots of nobody are 0."""
        num_groups, _, width = x.shape
        num_slots = num_experts * capacity

        def local(
            x_GSM: Float[Array, "G S M"], flat_GSK: Int[Array, "G S K"]
        ) -> Float[Array, "G X M"]:
            return _into_slots(x_GSM, flat_GSK, _choice_of_slot(flat_GSK, num_slots))

        flat_GSK = flat_slot(routing, num_experts, capacity)
        x_GXM = manual(
            local,
            {"tokens": (x, _TOKENS), "slots of choices": (flat_GSK, _INDICES)},
            result=_TOKENS,
            over=(axes.GROUP,),
        )
        return x_GXM.reshape(num_groups, num_experts, capacity, width)

    def combine(self, y: Float[Array, "G E C M"], routing: Routing) -> Float[Array, "G S M"]:
        """Return each token the weighted sum of its slots; 0 where it has none."""
        num_groups, num_experts, capacity, width = y.shape
        num_slots = num_experts * capacity

        def local(
            y_GXM: Float[Array, "G X M"],
            flat_GSK: Int[Array, "G S K"],
            weight_GSK: Float[Array, "G S K"],
        ) -> Float[Array, "G S M"]:
            y_GSKM = _out_of_slots(y_GXM, flat_GSK, _choice_of_slot(flat_GSK, num_slots))
            # Weights are rounded and summed in float32, as by the other methods.
            weight_GSK = weight_GSK.astype(y_GXM.dtype).astype(jnp.float32)
            return jnp.sum(weight_GSK[..., None] * y_GSKM.astype(jnp.float32), axis=2)

        y_GSM = manual(
            local,
            {
                "slots": (y.reshape(num_groups, num_slots, width), _TOKENS),
                "slots of choices": (flat_slot(routing, num_experts, capacity), _INDICES),
                "weights": (routing.weight, _INDICES),
            },
            result=_TOKENS,
            over=(axes.GROUP,),
        )
        return y_GSM.astype(y.dtype)


def _choice_of_slot(flat_GSK: Int[Array, "G S K"], num_slots: int) -> Int[Array, "G X"]:
    """Invert the slot numbers: s * K + k of the choice in each slot, S * K in slots of nobody."""
    num_groups, size, num_choices = flat_GSK.shape
    number_R = jnp.arange(size * num_choices, dtype=flat_GSK.dtype)
    empty_GX = jnp.full((num_groups, num_slots), size * num_choices, flat_GSK.dtype)
    return jax.vmap(lambda choice_X, flat_R: choice_X.at[flat_R].set(number_R, mode="drop"))(
        empty_GX, flat_GSK.reshape(num_groups, -1)
    )


@jax.vmap
def _rows(of_AM: Float[Array, "A M"], index_R: Int[Array, "R ..."]) -> Float[Array, "R ... M"]:
    return of_AM.at[index_R].get(mode="fill", fill_value=0)


# Each of the two is the gradient of the other, up to the sum over choices. JAX does not know that a
# slot is given once, and would scatter.
@jax.custom_vjp
def _into_slots(
    x_GSM: Float[Array, "G S M"], flat_GSK: Int[Array, "G S K"], choice_GX: Int[Array, "G X"]
) -> Float[Array, "G X M"]:
    return _rows(x_GSM, choice_GX // flat_GSK.shape[-1])


def _into_slots_forward(x_GSM, flat_GSK, choice_GX):
    return _into_slots(x_GSM, flat_GSK, choice_GX), flat_GSK


def _into_slots_backward(flat_GSK, x_GXM):
    x_GSKM = _rows(x_GXM, flat_GSK)
    return jnp.sum(x_GSKM, axis=2, dtype=jnp.float32).astype(x_GXM.dtype), None, None


_into_slots.defvjp(_into_slots_forward, _into_slots_backward)


@jax.custom_vjp
def _out_of_slots(
    y_GXM: Float[Array, "G X M"], flat_GSK: Int[Array, "G S K"], choice_GX: Int[Array, "G X"]
) -> Float[Array, "G S K M"]:
    del choice_GX
    return _rows(y_GXM, flat_GSK)


def _out_of_slots_forward(y_GXM, flat_GSK, choice_GX):
    return _out_of_slots(y_GXM, flat_GSK, choice_GX), choice_GX


def _out_of_slots_backward(choice_GX, y_GSKM):
    num_groups, size, num_choices, width = y_GSKM.shape
    y_GRM = y_GSKM.reshape(num_groups, size * num_choices, width)
    return _rows(y_GRM, choice_GX), None, None


_out_of_slots.defvjp(_out_of_slots_forward, _out_of_slots_backward)

"""What models do with their layers: keys in, sown values out, none that stands twice."""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from gshard_exp.errors import SettingError


def layer_rngs(key: Key[Array, ""] | None) -> dict[str, Key[Array, ""]]:
    """Return the keys that layers draw from in training; none without a key."""
    return (
        {} if key is None else dict(zip(("dropout", "routing"), jax.random.split(key), strict=True))
    )


def router_losses(
    intermediates: Mapping, *, aux_loss_factor: float, router_z_loss_factor: float, share: float
) -> tuple[Float[Array, ""], dict]:
    """Add up what routers add to a loss.

    Args:
        intermediates: what the module sowed.
        aux_loss_factor: of the sum over MoE layers of E^2 * l_aux.
        router_z_loss_factor: of the sum over MoE layers of the router z-loss.
        share: of this part in the whole batch; weighs means over groups.

    Returns:
        The loss, and the metrics `means` and `router`; all of it adds up over parts.
    """
    aux = sum_over_layers(intermediates, "auxiliary_loss")
    router_z = sum_over_layers(intermediates, "router_z_loss")
    loss = aux_loss_factor * aux + router_z_loss_factor * router_z
    means = {"auxiliary_loss": aux, "router_z_loss": router_z, "router_loss": loss}
    metrics = {"means": means, "router": layer_health(intermediates)}
    # 0 in value; its gradient is the load that biases of routers go by, and adds up over parts.
    bias_loss = sum_over_layers(intermediates, "bias_loss")
    return share * loss + bias_loss, jax.tree.map(lambda mean: share * mean, metrics)


def layer_health(intermediates: Mapping) -> dict[str, dict[str, Array]]:
    """Collect router health.

    Args:
        intermediates: what the module sowed; leaves have a leading axis over repetitions of a
            stack's pattern.

    Returns:
        {"encoder/pattern_1": {metric: float32 [repeats, ...]}} for each sparse block of a pattern.
    """
    return {
        f"{stack}/{block}": values["ffn"]["health"][0]
        for stack, blocks in intermediates.items()
        for block, values in blocks.items()
    }


def sum_over_layers(intermediates: Mapping, name: str) -> Float[Array, ""]:
    """Sum a scalar that layers sowed; 0 if none did."""
    # A sown value is the first entry of a tuple under its name; `health` has an `auxiliary_loss`
    # of its own, deeper down, which is not what is summed.
    leaves = [
        value
        for path, value in jax.tree_util.tree_leaves_with_path(intermediates)
        if getattr(path[-2], "key", None) == name
    ]
    return sum((jnp.sum(leaf) for leaf in leaves), jnp.zeros((), jnp.float32))


def refuse_shared_layers(module: nn.Module) -> None:
    """Refuse a tree in which one layer object stands twice: flax would tie its parameters."""
    places: dict[int, str] = {}

    def visit(node: object, place: str) -> None:
        if isinstance(node, tuple):
            for index, item in enumerate(node):
                visit(item, f"{place}[{index}]")
        if not isinstance(node, nn.Module):
            return
        first = places.setdefault(id(node), place)
        if first != place:
            raise SettingError(
                f"one {type(node).__name__} object stands at both {first} and {place}: the two "
                "layers would share their parameters.",
                settings=(place,),
                hint="Make an object for each place.",
            )
        for field in dataclasses.fields(node):
            if field.name not in ("parent", "name"):
                visit(getattr(node, field.name), f"{place}.{field.name}")

    visit(module, "module")

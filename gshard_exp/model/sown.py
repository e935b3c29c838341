"""What models do with their layers: collect what they sowed, refuse those that stand twice."""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gshard_exp.errors import SettingError


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

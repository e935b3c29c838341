"""The decoder without a loop over its layers, for step-by-step decoding.

A scan over stacked parameters reads each layer's slice of them by copying it, and writes its cache
by copying that. Training does not feel it, for there a layer works through thousands of tokens; a
step of decoding has a few, and would take three times as long to read its weights.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from gshard_exp.model.contract import Params
from gshard_exp.model.rebuild import rebuilt
from gshard_exp.model.transformer import DecoderBlock, Stack, Transformer


class UnrolledStack(nn.Module):
    """Blocks in a row, each with parameters and a cache of its own.

    Attributes:
        blocks: all of them; no object stands twice.
    """

    blocks: tuple[DecoderBlock, ...]

    @nn.compact
    def __call__(
        self, x_BLM: Float[Array, "B L M"], inputs: Mapping[str, Any], **how: bool
    ) -> Float[Array, "B L M"]:
        """Apply all blocks, as `Stack` does."""
        for block in self.blocks:
            x_BLM = block(x_BLM, **how, **inputs)
        return x_BLM


def unroll(module: Transformer) -> Transformer:
    """Return the same network with its decoder unrolled; its parameters are `unroll_params`'."""
    stack = module.decoder
    blocks = tuple(
        rebuilt(stack.pattern[layer % len(stack.pattern)]) for layer in range(stack.num_layers)
    )
    return dataclasses.replace(module, decoder=UnrolledStack(blocks))


def unroll_params(stack: Stack, params: Params) -> Params:
    """Take the parameters of a Transformer's decoder apart, layer by layer.

    Args:
        stack: the decoder that they belong to.
        params: of the whole Transformer. Those outside the decoder are passed on.
    """
    period = len(stack.pattern)
    blocks = {
        f"blocks_{layer}": jax.tree.map(
            lambda leaf, repeat=layer // period: leaf[repeat],
            params["decoder"][f"pattern_{layer % period}"],
        )
        for layer in range(stack.num_layers)
    }
    return {**params, "decoder": blocks}

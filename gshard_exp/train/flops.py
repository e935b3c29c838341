"""Counts the useful work of a training step from the configuration, part by part.

Useful are the multiply-adds of the products that the model is defined by, two operations each:
projections, attention scores and mixing (whole, also where a causal mask hides half), feed-forward
layers, the K experts that a token may be sent to and the one that all share, router and logits.
Not counted: what a way of computing adds (dispatch by einsum, recomputation, slots that stay
empty), element-wise work, look-ups and the optimizer.
"""

from collections.abc import Mapping

from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.model.transformer import DecoderBlock, EncoderBlock
from gshard_exp.moe.layer import MoeLayer

# The backward pass multiplies each product's gradient with both of its factors.
FORWARD_AND_BACKWARD = 3


def useful_flops(
    model: Seq2SeqModel, *, batch_size: int, lengths: Mapping[str, int]
) -> dict[str, int]:
    """Return the useful operations of one training step by part, forward and backward.

    Args:
        model: network and losses.
        batch_size: rows, over all devices; every position counts, padding or not.
        lengths: tokens in a row, by `inputs` and `targets`.

    Returns:
        Floating-point operations, global: `attention projections`, `attention scores`, `dense
        feed-forward`, `experts`, `router`, `logits`.
    """
    module = model.module
    source, target = lengths["inputs"], lengths["targets"]
    width = module.target_embedding.embed_dim
    parts = dict.fromkeys(
        (
            "attention projections",
            "attention scores",
            "dense feed-forward",
            "experts",
            "router",
            "logits",
        ),
        0,
    )
    for stack, length in ((module.encoder, source), (module.decoder, target)):
        for block in stack.pattern:
            for part, flops in _block(block, batch_size, length, source, width).items():
                parts[part] += stack.repeats * flops
    parts["logits"] = 2 * batch_size * target * width * module.target_embedding.vocab_size
    return {part: FORWARD_AND_BACKWARD * flops for part, flops in parts.items()}


def _block(
    block: EncoderBlock | DecoderBlock, rows: int, length: int, source: int, width: int
) -> dict[str, int]:
    """Count one block's forward pass."""
    parts = _attention(block.attention, rows, length, length, width)
    if isinstance(block, DecoderBlock):
        cross = _attention(block.cross_attention, rows, length, source, width)
        parts = {part: flops + cross[part] for part, flops in parts.items()}
    ffn, tokens = block.ffn, rows * length
    if isinstance(ffn, MoeLayer):
        choices = min(ffn.gating.num_choices, ffn.num_experts)
        parts["experts"] = choices * 4 * tokens * width * ffn.expert_mlp_dim
        parts["router"] = 2 * tokens * width * ffn.num_experts
        # The shared expert is a dense layer beside the others.
        parts["dense feed-forward"] = 4 * tokens * width * ffn.shared_mlp_dim
    else:
        parts["dense feed-forward"] = 4 * tokens * width * ffn.mlp_dim
    return parts


def _attention(attention, rows: int, queries: int, keys: int, width: int) -> dict[str, int]:
    inner = attention.num_heads * attention.head_dim
    return {
        # Query and output on one side, key and value on the other.
        "attention projections": 2 * rows * (2 * queries + 2 * keys) * width * inner,
        "attention scores": 2 * rows * 2 * queries * keys * inner,
    }

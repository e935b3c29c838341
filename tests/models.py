"""Tiny models, rules and batches that several tests share. No gin: plain constructors."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from gshard_exp import axes
from gshard_exp.data.batches import to_mesh
from gshard_exp.model.layers import Embedding, FeedForward, MultiHeadAttention
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.model.transformer import DecoderBlock, EncoderBlock, Stack, Transformer
from gshard_exp.moe.layer import MoeLayer
from gshard_exp.sharding.rules import Rules

VOCAB, WIDTH, HEADS, EXPERTS = 32, 16, 8, 8
ROWS, SOURCE, TARGET = 16, 8, 16

# The paper's layout, as gin/sharding/expert_parallel.gin has it; what is not named is replicated.
_SPLIT = {
    axes.MLP: axes.MODEL,
    axes.HEADS: axes.MODEL,
    axes.EXPERT: axes.EXPERT_AXIS,
    axes.EXPERT_MLP: axes.MODEL,
    axes.BATCH: (axes.DATA, axes.EXPERT_AXIS),
    axes.ACTIVATION_MLP: axes.MODEL,
    axes.ACTIVATION_HEADS: axes.MODEL,
    axes.GROUP: (axes.DATA, axes.EXPERT_AXIS),
    axes.EXPERT_GROUP: axes.DATA,
}


def table(**changes) -> tuple:
    """The rules table, with some rules replaced."""
    return tuple((name, (_SPLIT | changes).get(name)) for name in axes.LOGICAL_AXES)


RULES = Rules(table())


def moe(**changes) -> MoeLayer:
    return MoeLayer(**{"num_experts": EXPERTS, "expert_mlp_dim": 16, "group_size": 16} | changes)


def model(
    *,
    repeats: tuple[int, int] = (2, 1),
    sparse: dict | None = {},  # noqa: B006  never changed
    dropout: float = 0.1,
    head_dim: int = 4,
    unroll: int = 1,
    remat: str = "none",
    dtype: str = "float32",
    **losses: float,
) -> Seq2SeqModel:
    """`repeats` of (dense, sparse) in encoder and decoder; of (dense,) where `sparse` is None.

    Every layer is an object of its own: flax shares the parameters of a module that is used twice.
    """

    def attention():
        return MultiHeadAttention(num_heads=HEADS, head_dim=head_dim, dropout_rate=dropout)

    def layers():
        return [FeedForward(mlp_dim=16), *([] if sparse is None else [moe(**sparse)])]

    encoder = tuple(
        EncoderBlock(attention=attention(), ffn=ffn, dropout_rate=dropout) for ffn in layers()
    )
    decoder = tuple(
        DecoderBlock(
            attention=attention(), cross_attention=attention(), ffn=ffn, dropout_rate=dropout
        )
        for ffn in layers()
    )
    how: dict[str, Any] = {"unroll": unroll, "remat": remat}
    module = Transformer(
        source_embedding=Embedding(vocab_size=VOCAB, embed_dim=WIDTH),
        target_embedding=Embedding(vocab_size=VOCAB, embed_dim=WIDTH),
        encoder=Stack(num_layers=repeats[0] * len(encoder), pattern=encoder, **how),
        decoder=Stack(num_layers=repeats[1] * len(decoder), pattern=decoder, **how),
        dropout_rate=dropout,
        dtype=dtype,
    )
    weights = {"label_smoothing": 0.1, "z_loss": 1e-3, "aux_loss_factor": 0.1}
    return Seq2SeqModel(module, **weights | {"router_z_loss_factor": 0.01} | losses)


def batch(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    """Packed rows: two examples each, and padding at the end of some."""
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    for side, length in (("encoder", SOURCE), ("decoder", TARGET)):
        segments = np.zeros((rows, length), np.int32)
        positions = np.zeros((rows, length), np.int32)
        for row in range(rows):
            first, end = rng.integers(2, length // 2), rng.integers(length // 2, length + 1)
            segments[row, :first], segments[row, first:end] = 1, 2
            positions[row, :first], positions[row, first:end] = np.arange(first), np.arange(
                end - first
            )
        tokens = np.where(segments > 0, rng.integers(1, VOCAB, segments.shape), 0).astype(np.int32)
        found |= {f"{side}_segment_ids": segments, f"{side}_positions": positions}
        if side == "encoder":
            found["encoder_input_tokens"] = tokens
        else:
            shifted = np.where(positions > 0, np.roll(tokens, 1, axis=1), 0).astype(np.int32)
            found["decoder_input_tokens"], found["decoder_target_tokens"] = shifted, tokens
            found["decoder_loss_weights"] = (segments > 0).astype(np.int32)
    return found


def on_mesh(host_batch, mesh, rules=RULES):
    sharding = rules.sharding(
        (axes.BATCH, axes.LENGTH), shape=(ROWS, TARGET), mesh=mesh, what="the batch"
    )
    return to_mesh(host_batch, sharding)


@dataclasses.dataclass(frozen=True)
class Sgd:
    """Steps along the gradient; after the first step its state is that step's gradient."""

    learning_rate: float = 0.1

    def make(self, names):
        del names
        return optax.sgd(self.learning_rate, momentum=0.9)


def gradients(state):
    """What `Sgd` keeps after its first step."""
    return state.opt_state[0].trace


def assert_trees_close(got, expected, *, rtol=2e-5, atol=2e-6):
    """Compare each array, scaling `atol` to its largest entry; name the one that differs."""
    got, expected = jax.device_get((got, expected))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    )
    for (path, leaf), other in pairs:
        scale = max(float(np.max(np.abs(other))), 1e-3) if np.size(other) else 1.0
        np.testing.assert_allclose(
            np.asarray(leaf, np.float32),
            np.asarray(other, np.float32),
            rtol=rtol,
            atol=atol * scale,
            err_msg=jax.tree_util.keystr(path),
        )

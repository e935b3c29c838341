"""Tiny models, rules and batches that several tests share. No gin: plain constructors."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax

from gshard_exp import axes
from gshard_exp.data.batches import RandomData, to_mesh
from gshard_exp.model.layers import Embedding, FeedForward, MultiHeadAttention
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.model.transformer import DecoderBlock, EncoderBlock, Stack, Transformer
from gshard_exp.moe.layer import MoeLayer
from gshard_exp.sharding.mesh import MeshSpec
from gshard_exp.sharding.rules import Rules
from gshard_exp.train.checkpoint import Checkpoints
from gshard_exp.train.experiment import Experiment
from gshard_exp.train.invariance import quick_compilation
from gshard_exp.train.state import plan_state
from gshard_exp.train.step import partitioned_train_step

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
    axes.IMAGE_ROWS: axes.MODEL,
}


def table(**changes) -> tuple:
    """The rules table, with some rules replaced."""
    return tuple((name, (_SPLIT | changes).get(name)) for name in axes.LOGICAL_AXES)


RULES = Rules(table())


def moe(**changes) -> MoeLayer:
    return MoeLayer(**{"num_experts": EXPERTS, "expert_mlp_dim": 16, "group_size": 16} | changes)


def model(
    *,
    encoder: str = "s",
    decoder: str = "d",
    repeats: tuple[int, int] = (2, 1),
    sparse: Mapping[str, Any] = MappingProxyType({}),
    dropout: float = 0.1,
    head_dim: int = 4,
    unroll: int = 1,
    remat: str = "none",
    dtype: str = "float32",
    **losses: float,
) -> Seq2SeqModel:
    """Patterns are written in letters, d(ense) and s(parse), and repeated.

    Every layer is an object of its own: flax shares the parameters of a module that is used twice.
    """

    def attention():
        return MultiHeadAttention(num_heads=HEADS, head_dim=head_dim, dropout_rate=dropout)

    def ffn(letter):
        return moe(**sparse) if letter == "s" else FeedForward(mlp_dim=16)

    encoder_pattern = tuple(
        EncoderBlock(attention=attention(), ffn=ffn(letter), dropout_rate=dropout)
        for letter in encoder
    )
    decoder_pattern = tuple(
        DecoderBlock(
            attention=attention(),
            cross_attention=attention(),
            ffn=ffn(letter),
            dropout_rate=dropout,
        )
        for letter in decoder
    )
    how: dict[str, Any] = {"unroll": unroll, "remat": remat}
    module = Transformer(
        source_embedding=Embedding(vocab_size=VOCAB, embed_dim=WIDTH),
        target_embedding=Embedding(vocab_size=VOCAB, embed_dim=WIDTH),
        encoder=Stack(num_layers=repeats[0] * len(encoder), pattern=encoder_pattern, **how),
        decoder=Stack(num_layers=repeats[1] * len(decoder), pattern=decoder_pattern, **how),
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
            positions[row, :first], positions[row, first:end] = (
                np.arange(first),
                np.arange(end - first),
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
    return to_mesh(host_batch, mesh, rules)


def compiled(function, *args):
    """Compile for arguments like these, in little time."""
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    return jitted.lower(*args).compile(quick_compilation())


def quick(function):
    """Compile in little time, for whatever shapes it meets."""
    return jax.jit(function, compiler_options=_quick())


def run(function, *args):
    return compiled(function, *args)(*args)


@dataclasses.dataclass(frozen=True)
class Sgd:
    """Steps along the gradient; after the first step its state is that step's gradient."""

    learning_rate: float = 0.1

    def make(self, names):
        del names
        return optax.sgd(self.learning_rate, momentum=0.9)


def experiment(**changes) -> Experiment:
    """A model of these tests as an experiment."""
    fields: dict[str, Any] = {
        "model_dir": "unused",
        "model": model(),
        "data": RandomData(VOCAB, VOCAB),
        "lengths": {"inputs": SOURCE, "targets": TARGET},
        "batch_size": ROWS,
        "train_steps": 1,
        "optimizer": Sgd(),
        "rules": RULES,
        "checkpoints": Checkpoints(every_steps=1),
    }
    return Experiment(**fields | changes)


def devices(count: int = 1):
    """A mesh of `count` devices along `data`."""
    return MeshSpec(data=count).build(jax.devices()[:count])


def start(seq2seq: Seq2SeqModel, optimizer=Sgd()):
    """The state of step 0, on the host."""
    plan = plan_state(seq2seq, optimizer, devices(), RULES)

    def init(key):
        params, _ = seq2seq.init(key)
        return params

    params = run(init, jax.random.key(0))
    zero = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), plan.abstract)
    return jax.device_get(
        zero.replace(
            params=params,
            opt_state=plan.tx.init(params),
            rng=jax.random.key_data(jax.random.key(2)),
        )
    )


def step_function(seq2seq, mesh, begin, *, optimizer=Sgd(), rules=RULES, microbatches=1):
    """The real train step compiled for a mesh: host batch -> (state, metrics) after one step."""
    plan = plan_state(seq2seq, optimizer, mesh, rules)

    def place(host_batch):
        return jax.device_put(begin, plan.shardings), on_mesh(host_batch, mesh, rules)

    step = partitioned_train_step(plan, rules, microbatches)
    step = compiled(step, *place(batch()))
    return lambda host_batch: step(*place(host_batch))


def outcome(stepped) -> dict:
    """What one step of `Sgd` computed, on the host."""
    state, metrics = stepped
    gradients = state.opt_state[0].trace
    return jax.device_get({"metrics": metrics, "params": state.params, "gradients": gradients})


def assert_trees_close(got, expected, *, rtol=2e-5, atol=2e-6):
    """Compare each array, scaling `atol` to its largest entry; name the one that differs."""
    got, expected = jax.device_get((got, expected))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, leaf), other in pairs:
        scale = max(float(np.max(np.abs(other))), 1e-3) if np.size(other) else 1.0
        np.testing.assert_allclose(
            np.asarray(leaf, np.float32),
            np.asarray(other, np.float32),
            rtol=rtol,
            atol=atol * scale,
            err_msg=jax.tree_util.keystr(path),
        )

"""The encoder-decoder Transformer, assembled from a pattern of blocks (paper section 2)."""

from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning
from jaxtyping import Array, Bool, Float, Int

from gshard_exp import axes
from gshard_exp.errors import SettingError, require_at_least, require_one_of, require_within
from gshard_exp.model import masks
from gshard_exp.model.layers import (
    DecodePositions,
    Dropout,
    Embedding,
    FeedForward,
    MultiHeadAttention,
    RmsNorm,
    sinusoidal_positions,
)
from gshard_exp.moe.layer import MoeLayer
from gshard_exp.recompute import REMAT_POLICIES
from gshard_exp.sharding.annotate import constrain


class EncoderBlock(nn.Module):
    """Self-attention, then a dense or sparse feed-forward layer; pre-norm, residual.

    Attributes:
        attention: template of the self-attention.
        ffn: template of the feed-forward layer: `FeedForward` or `MoeLayer`.
        dropout_rate: applied to the output of each sublayer before the residual sum.
    """

    attention: MultiHeadAttention
    ffn: FeedForward | MoeLayer
    dropout_rate: float

    def __post_init__(self) -> None:
        """Refuse rates that leave nothing."""
        require_within(self, 0.0, 1.0, "dropout_rate")
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x_BLM: Float[Array, "B L M"],
        *,
        mask: Bool[Array, "B L L"],
        valid: Bool[Array, "B L"],
        rows: Int[Array, " B"],
        deterministic: bool,
    ) -> Float[Array, "B L M"]:
        """Apply the block; shapes and dtype stay."""
        how = {"rows": rows, "deterministic": deterministic}
        normed = RmsNorm(name="attention_norm")(x_BLM)
        y = self.attention(normed, normed, mask=mask, **how)
        x_BLM = x_BLM + Dropout(self.dropout_rate, name="attention_dropout")(y, **how)
        y = self.ffn(RmsNorm(name="ffn_norm")(x_BLM), valid=valid, **how)
        x_BLM = x_BLM + Dropout(self.dropout_rate, name="ffn_dropout")(y, **how)
        return constrain(x_BLM, axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED)


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder, then a feed-forward layer.

    Attributes:
        attention: template of the self-attention.
        cross_attention: template of the attention to the encoder's output.
        ffn: template of the feed-forward layer: `FeedForward` or `MoeLayer`.
        dropout_rate: applied to the output of each sublayer before the residual sum.
    """

    attention: MultiHeadAttention
    cross_attention: MultiHeadAttention
    ffn: FeedForward | MoeLayer
    dropout_rate: float

    def __post_init__(self) -> None:
        """Refuse rates that leave nothing, and routing that sees the future."""
        require_within(self, 0.0, 1.0, "dropout_rate")
        if isinstance(self.ffn, MoeLayer) and self.ffn.gating.looks_ahead:
            raise SettingError(
                f"{type(self.ffn.gating).__name__} routes a token by those behind it, which a "
                "causal decoder must not see.",
                settings=("ffn.gating", "ffn"),
                hint="Use it in the encoder only; here let tokens choose, in order of position.",
            )
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x_BLM: Float[Array, "B L M"],
        *,
        memory: Float[Array, "B K M"],
        mask: Bool[Array, "B L L"] | None,
        memory_mask: Bool[Array, "B L K"],
        valid: Bool[Array, "B L"],
        rows: Int[Array, " B"],
        deterministic: bool,
        decode: bool = False,
        keep_memory: bool = False,
    ) -> Float[Array, "B L M"]:
        """Apply the block; shapes and dtype stay.

        `decode` and `keep_memory`: see `Transformer.decode`.
        """
        how = {"rows": rows, "deterministic": deterministic}
        normed = RmsNorm(name="attention_norm")(x_BLM)
        y = self.attention(normed, normed, mask=mask, cache="append" if decode else None, **how)
        x_BLM = x_BLM + Dropout(self.dropout_rate, name="attention_dropout")(y, **how)
        normed = RmsNorm(name="cross_attention_norm")(x_BLM)
        cache = "keep" if keep_memory else None
        y = self.cross_attention(normed, memory, mask=memory_mask, cache=cache, **how)
        x_BLM = x_BLM + Dropout(self.dropout_rate, name="cross_attention_dropout")(y, **how)
        y = self.ffn(RmsNorm(name="ffn_norm")(x_BLM), valid=valid, decode=decode, **how)
        x_BLM = x_BLM + Dropout(self.dropout_rate, name="ffn_dropout")(y, **how)
        return constrain(x_BLM, axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED)


class _Period(nn.Module):
    """One repetition of a stack's pattern, in the form that a scan wants."""

    blocks: tuple[EncoderBlock | DecoderBlock, ...]
    how: Mapping[str, bool]

    @nn.compact
    def __call__(self, x_BLM, inputs):
        for block in self.blocks:
            x_BLM = block(x_BLM, **self.how, **inputs)
        return x_BLM, None


class Stack(nn.Module):
    """A pattern of blocks, repeated.

    Parameters of all repetitions are stacked along a leading `layers` axis, whether the
    repetitions run as a scan or unrolled: one checkpoint, one initialisation and the same random
    numbers serve both.

    Attributes:
        num_layers: blocks in all; a multiple of the pattern's length.
        pattern: blocks of one period, in order. Which layers are sparse is said here: the paper's
            "every other layer" is (dense, sparse).
        unroll: repetitions per iteration of the scan; `num_layers / len(pattern)` is no loop.
        remat: a key of `recompute.REMAT_POLICIES`.
    """

    num_layers: int
    pattern: tuple[EncoderBlock | DecoderBlock, ...]
    unroll: int = 1
    remat: str = "none"

    def __post_init__(self) -> None:
        """Refuse depths that the pattern does not divide and unknown policies."""
        if not self.pattern or self.num_layers % len(self.pattern) or self.num_layers < 1:
            raise SettingError(
                f"num_layers={self.num_layers} is not a positive multiple of the "
                f"{len(self.pattern)} blocks of the pattern. Set a multiple of it",
                settings=("num_layers", "pattern"),
            )
        require_one_of(self, REMAT_POLICIES, "remat")
        require_at_least(self, 1, "unroll")
        super().__post_init__()

    @property
    def repeats(self) -> int:
        """Number of times that the pattern stands in the stack."""
        return self.num_layers // len(self.pattern)

    @nn.compact
    def __call__(self, x_BLM: Float[Array, "B L M"], inputs: dict, **how: bool):
        """Apply all blocks. `inputs` and `how` are the keyword arguments of every block."""
        period = _Period
        if self.remat != "none":
            # A loop keeps XLA from merging the recomputation with the first computation; where no
            # loop is left it needs a barrier.
            period = nn.remat(
                period,
                policy=REMAT_POLICIES[self.remat],
                prevent_cse=self.unroll > 1 or self.repeats == 1,
            )
        scanned = nn_partitioning.scan_with_axes(
            period,
            variable_axes={"params": 0, "intermediates": 0, "cache": 0},
            split_rngs={"params": True, "dropout": True, "routing": True},
            in_axes=nn.broadcast,
            length=self.repeats,
            unroll=self.unroll,
            axis_name=axes.LAYERS,
        )
        x_BLM, _ = scanned(blocks=tuple(self.pattern), how=how, name="layers")(x_BLM, inputs)
        return x_BLM


class Transformer(nn.Module):
    """Encoder-decoder Transformer with separate source and target embeddings.

    What the paper leaves open, and whose choice is taken: sinusoidal positions (Vaswani et al.),
    RMS norm without bias and a final norm on each stack (lingvo, T5), logits from the target
    embedding (implied by the paper's parameter counts; scaled as in T5).

    `__call__`, `encode` and `decode` take what t5x's `EncoderDecoderModel` gives (t5x/models.py).

    Attributes:
        source_embedding: template of the source embedding.
        target_embedding: template of the target embedding, also the output matrix.
        encoder: stack of `EncoderBlock`s.
        decoder: stack of `DecoderBlock`s.
        dropout_rate: applied to the inputs of both stacks (and their outputs are not dropped).
        dtype: of the activations; parameters, router, norms' statistics, softmax and logits are
            float32 always (other float32 products multiply as the accelerator does by default, on
            TPU in bfloat16). The paper: float32, and bfloat16 for its 60-layer run.
    """

    source_embedding: Embedding
    target_embedding: Embedding
    encoder: Stack
    decoder: Stack
    dropout_rate: float
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse dtypes and rates without meaning."""
        require_one_of(self, ("float32", "bfloat16"), "dtype")
        require_within(self, 0.0, 1.0, "dropout_rate")
        super().__post_init__()

    def setup(self) -> None:
        """Declare what belongs to neither stack."""
        self.encoder_norm = RmsNorm()
        self.decoder_norm = RmsNorm()
        self.input_dropout = Dropout(self.dropout_rate)
        self.decode_positions = DecodePositions()

    @property
    def scan_layers(self) -> bool:
        """Say that a cache has a leading axis over layers; t5x asks."""
        return isinstance(self.decoder, Stack)

    def __call__(
        self,
        encoder_input_tokens: Int[Array, "B K"],
        decoder_input_tokens: Int[Array, "B L"],
        decoder_target_tokens: Int[Array, "B L"],
        *,
        encoder_segment_ids: Int[Array, "B K"] | None = None,
        decoder_segment_ids: Int[Array, "B L"] | None = None,
        encoder_positions: Int[Array, "B K"] | None = None,
        decoder_positions: Int[Array, "B L"] | None = None,
        rows: Int[Array, " B"] | None = None,
        enable_dropout: bool = True,
        decode: bool = False,
    ) -> Float[Array, "B L V"]:
        """Score every target position given the source and the targets before it.

        Args:
            encoder_input_tokens: source pieces; 0 is padding.
            decoder_input_tokens: targets shifted right.
            decoder_target_tokens: targets; 0 is padding.
            encoder_segment_ids: example of each position in a packed row, from 1; 0 is padding.
                Absent: one example a row.
            encoder_positions: position of each piece within its example.
            decoder_segment_ids, decoder_positions: the same on the target side.
            rows: index of each row in the global batch (keys the random numbers); default 0..B-1.
            enable_dropout: training. False: no randomness, capacity of evaluation.
            decode: make a cache, see `decode`.

        Returns:
            float32 logits.
        """
        encoded_BKM = self.encode(
            encoder_input_tokens,
            encoder_segment_ids,
            encoder_positions=encoder_positions,
            rows=rows,
            enable_dropout=enable_dropout,
        )
        return self.decode(
            encoded_BKM,
            encoder_input_tokens,
            decoder_input_tokens,
            decoder_target_tokens,
            encoder_segment_ids=encoder_segment_ids,
            decoder_segment_ids=decoder_segment_ids,
            decoder_positions=decoder_positions,
            rows=rows,
            enable_dropout=enable_dropout,
            decode=decode,
        )

    def encode(
        self,
        encoder_input_tokens: Int[Array, "B K"],
        encoder_segment_ids: Int[Array, "B K"] | None = None,
        *,
        encoder_positions: Int[Array, "B K"] | None = None,
        rows: Int[Array, " B"] | None = None,
        enable_dropout: bool = True,
    ) -> Float[Array, "B K M"]:
        """Encode the source; arguments as in `__call__`."""
        how = _how(rows, encoder_input_tokens, enable_dropout)
        segments_BK = masks.segments(encoder_segment_ids, encoder_input_tokens)
        x_BKM = self._embed(self.source_embedding, encoder_input_tokens, encoder_positions, **how)
        inputs = {
            "mask": masks.same_segment(segments_BK, segments_BK),
            "valid": segments_BK > 0,
            "rows": how["rows"],
        }
        x_BKM = self.encoder(x_BKM, inputs, deterministic=how["deterministic"])
        return self.encoder_norm(x_BKM)

    def decode(
        self,
        encoded: Float[Array, "B K M"],
        encoder_input_tokens: Int[Array, "B K"],
        decoder_input_tokens: Int[Array, "B L"],
        decoder_target_tokens: Int[Array, "B L"],
        *,
        encoder_segment_ids: Int[Array, "B K"] | None = None,
        decoder_segment_ids: Int[Array, "B L"] | None = None,
        decoder_positions: Int[Array, "B L"] | None = None,
        rows: Int[Array, " B"] | None = None,
        enable_dropout: bool = True,
        decode: bool = False,
        max_decode_length: int | None = None,
        keep_memory: bool = False,
        decoder_mask: Bool[Array, "B L T"] | None = None,
    ) -> Float[Array, "B L V"]:
        """Score target positions given an encoded source; arguments as in `__call__`.

        With `decode`, step by step with the collection `cache`, which has to be mutable: a first
        call, of the shape of all targets, makes it; each later call takes the next L tokens and
        attends to them and those before (`MultiHeadAttention`). Rows are not packed then.

        Args:
            encoded: not looked at in later calls with `keep_memory`; only its shape counts.
            encoder_input_tokens: only where 0, padding, and only without `encoder_segment_ids`.
            decoder_input_tokens: targets shifted right, or the next of them.
            decoder_target_tokens: only where 0, padding, and only without `decoder_segment_ids`.
            decoder_segment_ids: absent with `decode`: all count, for the first token is 0 too.
            decoder_positions: with `decode` the default goes on from the call before.
            max_decode_length: given by t5x; the cache has that size already.
            keep_memory: with `decode`, compute the keys and values of the encoder's output in the
                first call only. n times the rows of `encoded` may then be decoded, n consecutive
                ones with the same source. Without it they are computed in every call (as t5x
                does, whose first call sees no real source).
            decoder_mask: with `decode`, which of the T slots of the cache each token attends to;
                default: those up to its own.
        """
        del max_decode_length
        how = _how(rows, decoder_input_tokens, enable_dropout)
        source_BK = masks.segments(encoder_segment_ids, encoder_input_tokens)
        counted = jnp.ones_like(decoder_input_tokens) if decode else decoder_target_tokens
        target_BL = masks.segments(decoder_segment_ids, counted)
        inputs = {"memory": encoded, "valid": target_BL > 0, "rows": how["rows"]}
        if decode:
            if decoder_positions is None:
                decoder_positions = self.decode_positions(decoder_input_tokens)
            folded = decoder_input_tokens.size // source_BK.shape[0]
            inputs |= {"mask": decoder_mask, "memory_mask": masks.of_rows(source_BK, folded)}
        else:
            inputs["mask"] = masks.causal_segment(target_BL)
            inputs["memory_mask"] = masks.same_segment(target_BL, source_BK)
        x_BLM = self._embed(self.target_embedding, decoder_input_tokens, decoder_positions, **how)
        x_BLM = self.decoder(
            x_BLM,
            inputs,
            deterministic=how["deterministic"],
            decode=decode,
            keep_memory=keep_memory,
        )
        return self.target_embedding.logits(self.decoder_norm(x_BLM))

    def _embed(self, embedding, tokens, positions, *, rows, deterministic):
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        x_BLM = embedding(tokens, self.dtype)
        x_BLM = x_BLM + sinusoidal_positions(positions, x_BLM.shape[-1], self.dtype)
        x_BLM = self.input_dropout(x_BLM, rows=rows, deterministic=deterministic)
        return constrain(x_BLM, axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED)


def _how(rows: Int[Array, " B"] | None, tokens: Int[Array, "B L"], enable_dropout: bool) -> dict:
    rows = jnp.arange(tokens.shape[0]) if rows is None else rows
    return {"rows": rows, "deterministic": not enable_dropout}

"""Decode step by step: what a search asks of a model."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gshard_exp.model.contract import Params
from gshard_exp.model.seq2seq import Seq2SeqModel
from gshard_exp.model.transformer import Transformer
from gshard_exp.model.unrolled import unroll, unroll_params

Cache = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Source:
    """Encoded sentences.

    Attributes:
        encoded: output of the encoder.
        segments: 1 where there is a piece, 0 on padding.
    """

    encoded: Float[Array, "B K M"]
    segments: Int[Array, "B K"]


@dataclasses.dataclass(frozen=True)
class StepDecoder:
    """A model that is fed the next tokens, a few at a time.

    Attributes:
        module: the Transformer, its decoder unrolled.
        params: of that.
    """

    module: Transformer
    params: Params

    @classmethod
    def of(cls, model: Seq2SeqModel, params: Params) -> "StepDecoder":
        """Take a model and its parameters, as they were trained."""
        return cls(unroll(model.module), unroll_params(model.module.decoder, params))

    def encode(self, inputs: Int[Array, "B K"]) -> Source:
        """Encode sentences; 0 is padding."""
        segments = (inputs > 0).astype(jnp.int32)
        encoded = self.module.apply(
            {"params": self.params},
            inputs,
            segments,
            method=Transformer.encode,
            enable_dropout=False,
        )
        return Source(encoded, segments)

    def start(self, source: Source, *, rows: int, slots: int) -> Cache:
        """Return an empty cache, and in it the encoder's keys and values.

        Args:
            source: B sentences.
            rows: rows of the cache, a multiple n of B; n consecutive ones have the same source.
            slots: tokens that a row can hold.
        """
        tokens = jnp.zeros((rows, slots), jnp.int32)
        _, variables = self._decode({}, source, tokens, jnp.ones_like(tokens), tokens, None)
        return variables["cache"]

    def step(
        self,
        cache: Cache,
        source: Source,
        tokens: Int[Array, "R L"],
        *,
        positions: Int[Array, "R L"],
        valid: Bool[Array, "R L"],
        mask: Bool[Array, "R L T"] | None = None,
    ) -> tuple[Float[Array, "R L V"], Cache]:
        """Feed the next tokens.

        Args:
            cache: as `start` or the step before returned it.
            source: as given to `start`.
            tokens: what follows; 0 before the first.
            positions: of each within its sentence, from 0.
            valid: False on tokens of nobody, which no expert needs to see.
            mask: which slots each token attends to; default: those up to its own.

        Returns:
            float32 logits of what comes after each token, and the cache.
        """
        segments = valid.astype(jnp.int32)
        logits, variables = self._decode(
            {"cache": cache}, source, tokens, segments, positions, mask
        )
        return logits, variables["cache"]

    def _decode(self, variables, source, tokens, segments, positions, mask):
        return self.module.apply(
            {"params": self.params, **variables},
            source.encoded,
            source.segments,
            tokens,
            tokens,
            decoder_segment_ids=segments,
            decoder_positions=positions,
            decoder_mask=mask,
            decode=True,
            keep_memory=True,
            enable_dropout=False,
            mutable=["cache"],
            method=Transformer.decode,
        )


class Search(Protocol):
    """A way of looking for likely translations. Hashable: it is compiled into the program."""

    def __call__(self, decoder: StepDecoder, inputs: Int[Array, "B K"], *, max_length: int) -> Any:
        """Return `score.beam.Hypotheses` of each sentence."""
        ...


def reorder(cache: Cache, rows: Int[Array, " R"]) -> Cache:
    """Give each row of the cache another row's tokens; the encoder's side stays."""

    def take(path, leaf):
        return leaf[rows] if path[-1].key in ("cached_key", "cached_value") else leaf

    return jax.tree_util.tree_map_with_path(take, cache)

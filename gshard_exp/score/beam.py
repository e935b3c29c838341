"""Beam search over a key-value cache; greedy decoding is a beam of one."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gshard_exp.data.vocabulary import EOS_ID, PAD_ID
from gshard_exp.errors import require_at_least
from gshard_exp.model.incremental import StepDecoder, reorder

CHUNK = 64  # pieces whose highest logit is looked for first
NOTHING = -jnp.inf  # log probability and score of what is not there


class Hypotheses(flax.struct.PyTreeNode):
    """What a search found: k hypotheses for each sentence, the best first.

    Those that ended come before those that `max_length` cut off.

    Attributes:
        tokens: int32 [B, k, T]; 0 after the end.
        scores: float32 [B, k], log probability over length penalty; -inf where there is none.
        log_probs: float32 [B, k], nats, sum over the pieces, the end included.
        ended: bool [B, k].
    """

    tokens: Int[Array, "B k T"]
    scores: Float[Array, "B k"]
    log_probs: Float[Array, "B k"]
    ended: Bool[Array, "B k"]


class Beam(flax.struct.PyTreeNode):
    """State of a search: hypotheses that go on, and the best of those that ended.

    Attributes:
        tokens: int32 [B, k, T] of those that go on.
        log_probs: float32 [B, k] of those, from high to low; -inf: there is none.
        done: those that ended, from high to low score.
    """

    tokens: Int[Array, "B k T"]
    log_probs: Float[Array, "B k"]
    done: Hypotheses


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """Beam search that reorders its cache after every piece.

    A hypothesis of n pieces, its end included, scores

        log probability / ((5 + n) / 6) ^ alpha           (GNMT, arXiv 1609.08144, section 7)

    In each step the best 2 k of all continuations are looked at: those that end compete for the k
    places of ended hypotheses, the best k others go on. A sentence is done when none that goes on
    could beat its worst ended one, however it continues. With k = 1 only the likeliest piece is
    looked at: greedy decoding.

    The paper searches so (appendix A.1) and names neither k nor alpha; 4 and 0.8 are those that
    the names of decoders in the comments of lingvo's GShard models carry (`beam4`, `ln0.8`).

    Attributes:
        beam_size: k, hypotheses for each sentence.
        alpha: of the length penalty; 0 compares bare log probabilities.
        max_length: pieces at most, the end included; None: as many as in training.
    """

    beam_size: int = 4
    alpha: float = 0.8
    max_length: int | None = None

    def __post_init__(self) -> None:
        require_at_least(self, 1, "beam_size", "max_length")
        require_at_least(self, 0, "alpha")

    def __call__(
        self, decoder: StepDecoder, inputs: Int[Array, "B K"], *, max_length: int
    ) -> Hypotheses:
        """Translate.

        Args:
            decoder: the model.
            inputs: source pieces, 0 is padding; a row of padding gets no hypothesis.
            max_length: pieces at most, unless the search has its own.
        """
        length = self.max_length or max_length
        batch, beams = inputs.shape[0], self.beam_size
        source = decoder.encode(inputs)
        cache = decoder.start(source, rows=batch * beams, slots=length)
        first_row = jnp.arange(batch)[:, None] * beams

        def feed(cache, tokens, alive, position):
            logits, cache = decoder.step(
                cache,
                source,
                tokens.reshape(-1, 1),
                positions=jnp.full((batch * beams, 1), position),
                valid=alive.reshape(-1, 1),
            )
            return logits.reshape(batch, beams, -1), cache

        def follow(cache, parents, position):
            del position
            # With one hypothesis there is nothing to reorder.
            return cache if beams == 1 else reorder(cache, (first_row + parents).reshape(-1))

        nonempty = jnp.any(inputs > 0, axis=1)
        return search(self, nonempty, length, cache, feed, follow)


def search(
    settings: BeamSearch,
    nonempty: Bool[Array, " B"],
    length: int,
    memory: Any,
    feed: Callable,
    follow: Callable,
) -> Hypotheses:
    """Run a search, whatever way it keeps what its model needs.

    Args:
        settings: k and alpha.
        nonempty: which sentences to translate.
        length: T, pieces at most.
        memory: what the model keeps between steps, of any form.
        feed: (memory, tokens [B, k], alive [B, k], position) -> logits [B, k, V], memory.
        follow: (memory, parents [B, k], position) -> memory, when hypothesis j goes on from what
            hypothesis `parents[j]` was.
    """
    beam = _start(nonempty, settings.beam_size, length)

    def unfinished(carry):
        position, _, beam, _ = carry
        return (position < length) & jnp.any(beam.log_probs > NOTHING)

    def extend(carry):
        position, tokens, beam, memory = carry
        logits, memory = feed(memory, tokens, beam.log_probs > NOTHING, position)
        beam, parents = _advance(settings, beam, logits, position, length)
        tokens = jax.lax.dynamic_index_in_dim(beam.tokens, position, axis=2, keepdims=False)
        return position + 1, tokens, beam, follow(memory, parents, position)

    tokens = jnp.full(beam.log_probs.shape, PAD_ID, jnp.int32)
    _, _, beam, _ = jax.lax.while_loop(unfinished, extend, (0, tokens, beam, memory))
    return _finish(settings, beam, length)


def length_penalty(length: Int[Array, ""] | int, alpha: float) -> Float[Array, ""]:
    """Return ((5 + length) / 6) ^ alpha."""
    return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** alpha


def _start(nonempty: Bool[Array, " B"], beams: int, length: int) -> Beam:
    shape = (nonempty.shape[0], beams)
    none = jnp.full(shape, NOTHING, jnp.float32)
    tokens = jnp.full((*shape, length), PAD_ID, jnp.int32)
    # One empty hypothesis to go on from.
    first = none.at[:, 0].set(jnp.where(nonempty, 0.0, NOTHING))
    return Beam(tokens, first, Hypotheses(tokens, none, none, jnp.zeros(shape, bool)))


def _advance(settings, beam: Beam, logits, position, length) -> tuple[Beam, Int[Array, "B k"]]:
    """Extend each hypothesis by a piece; also return which each one came from."""
    beams = settings.beam_size
    log_probs, parents, pieces = _candidates(beam.log_probs, logits, 1 if beams == 1 else 2 * beams)
    tokens = jnp.take_along_axis(beam.tokens, parents[:, :, None], axis=1)
    tokens = jax.lax.dynamic_update_index_in_dim(tokens, pieces, position, axis=2)
    ends = (pieces == EOS_ID) & (log_probs > NOTHING)
    scores = jnp.where(ends, log_probs / length_penalty(position + 1, settings.alpha), NOTHING)
    new = Hypotheses(tokens, scores, log_probs, ends)
    done = _best(jax.tree.map(_along_beams, beam.done, new), beams)

    going_on = jnp.where(ends, NOTHING, log_probs)
    going_on, places = jax.lax.top_k(going_on, beams)
    # Log probabilities only fall, and no penalty is above that of the longest.
    best = going_on[:, :1] / length_penalty(length, settings.alpha)
    going_on = jnp.where(done.scores[:, -1:] >= best, NOTHING, going_on)
    beam = Beam(jnp.take_along_axis(tokens, places[:, :, None], axis=1), going_on, done)
    return beam, jnp.take_along_axis(parents, places, axis=1)


def _candidates(log_probs, logits, count: int):
    """Return the best continuations of all hypotheses: log probability, parent, piece.

    Two stages: the best of all lie among the best of each.
    """
    # Padding has a probability as every piece, and is no candidate.
    padding = (jnp.arange(logits.shape[-1]) == PAD_ID)[None, None, :]
    of_each = min(count, logits.shape[-1])
    best, pieces = _top_k(jnp.where(padding, NOTHING, logits), of_each)
    best += (log_probs - jax.nn.logsumexp(logits, axis=-1))[:, :, None]
    shape = (best.shape[0], -1)
    best, places = jax.lax.top_k(best.reshape(shape), min(count, best.shape[1] * of_each))
    return best, places // of_each, jnp.take_along_axis(pieces.reshape(shape), places, axis=1)


def _top_k(x: Float[Array, "B k V"], count: int) -> tuple[Array, Array]:
    """Return the highest numbers of the last axis and their indices, as `jax.lax.top_k`.

    Only `count` chunks, those of the highest maxima, are sorted: a third of the time on CPU.
    """
    chunks = math.ceil(x.shape[-1] / CHUNK)
    if chunks <= count:
        return jax.lax.top_k(x, count)
    missing = chunks * CHUNK - x.shape[-1]
    x = jnp.pad(x, [(0, 0), (0, 0), (0, missing)], constant_values=NOTHING)
    x = x.reshape(*x.shape[:2], chunks, CHUNK)
    _, chosen = jax.lax.top_k(jnp.max(x, axis=-1), count)
    x = jnp.take_along_axis(x, chosen[:, :, :, None], axis=2)
    best, places = jax.lax.top_k(x.reshape(*x.shape[:2], -1), count)
    of_place = jnp.take_along_axis(chosen, places // CHUNK, axis=-1)
    return best, of_place * CHUNK + places % CHUNK


def _along_beams(one, other):
    return jnp.concatenate([one, other], axis=1)


def _best(found: Hypotheses, count: int) -> Hypotheses:
    """Keep those of the best scores, from high to low."""
    _, places = jax.lax.top_k(found.scores, count)
    return _take(found, places)


def _take(found: Hypotheses, places: Int[Array, "B k"]) -> Hypotheses:
    def take(leaf):
        index = places.reshape(places.shape + (1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1)

    return jax.tree.map(take, found)


def _finish(settings, beam: Beam, length: int) -> Hypotheses:
    """Fill places without an ended hypothesis with those that `length` cut off."""
    scores = beam.log_probs / length_penalty(length, settings.alpha)
    cut = Hypotheses(beam.tokens, scores, beam.log_probs, jnp.zeros(scores.shape, bool))
    both = jax.tree.map(_along_beams, beam.done, cut)
    places = jnp.arange(settings.beam_size)[None, :]
    ended = jnp.sum(beam.done.ended, axis=1, keepdims=True)
    places = jnp.where(places < ended, places, settings.beam_size + places - ended)
    found = _take(both, places)
    there = (found.scores > NOTHING)[:, :, None]
    return found.replace(tokens=jnp.where(there, found.tokens, PAD_ID))

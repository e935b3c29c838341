"""Flat beam search (appendix A.1): all hypotheses in one sequence, told apart by a mask."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from gshard_exp.model.incremental import StepDecoder
from gshard_exp.score.beam import BeamSearch, Hypotheses, search


@dataclasses.dataclass(frozen=True)
class FlatBeamSearch(BeamSearch):
    """Beam search that never moves its keys and values.

    The k hypotheses of a sentence are interleaved in one sequence of k * T slots: the piece at
    position t of hypothesis j lies in slot t * k + j. When hypothesis j goes on from what
    hypothesis i was, it takes over row i of a 0/1 mask over the slots, and adds its own. Attention
    looks at k times as many keys as that of `BeamSearch`, from one array for k queries.

    Source: GShard, appendix A.1. Results are those of `BeamSearch`.
    """

    def __call__(
        self, decoder: StepDecoder, inputs: Int[Array, "B K"], *, max_length: int
    ) -> Hypotheses:
        """Translate; see `BeamSearch`."""
        length = self.max_length or max_length
        batch, beams = inputs.shape[0], self.beam_size
        source = decoder.encode(inputs)
        cache = decoder.start(source, rows=batch, slots=beams * length)
        slots = jnp.arange(beams * length)

        def own(position):
            """Mark the slot of each hypothesis at a position, [1, k, k * T]."""
            mine = position * beams + jnp.arange(beams)
            return slots[None, None, :] == mine[None, :, None]

        def feed(memory, tokens, alive, position):
            cache, mask = memory
            mask = mask | own(position)
            logits, cache = decoder.step(
                cache,
                source,
                tokens,
                positions=jnp.full(tokens.shape, position),
                valid=alive,
                mask=mask,
            )
            return logits, (cache, mask)

        def follow(memory, parents, position):
            del position
            cache, mask = memory
            return cache, jnp.take_along_axis(mask, parents[:, :, None], axis=1)

        mask = jnp.zeros((batch, beams, beams * length), bool)
        nonempty = jnp.any(inputs > 0, axis=1)
        return search(self, nonempty, length, (cache, mask), feed, follow)

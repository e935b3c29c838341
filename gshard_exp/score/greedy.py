"""Greedy decoding, and a few translations to look at during training."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from gshard_exp.data.batches import padded_batches, to_mesh
from gshard_exp.data.splits import SPLITS
from gshard_exp.data.tasks import TranslationTasks
from gshard_exp.errors import SettingError, require_at_least, require_one_of
from gshard_exp.model.seq2seq import Params, Seq2SeqModel
from gshard_exp.model.transformer import Transformer
from gshard_exp.sharding.annotate import partitioning
from gshard_exp.sharding.rules import Rules

END = 1  # the vocabularies' end-of-sentence piece
SHORTEST, LONGEST = 5, 14  # target pieces of a sentence worth showing, the end included


def greedy_decode(
    model: Seq2SeqModel, params: Params, inputs: Int[Array, "B K"], *, max_length: int
) -> Int[Array, "B L"]:
    """Extend each target by its likeliest piece until it ends.

    Runs the whole decoder for each new piece, without a cache: meant for a few samples.

    Args:
        model: the network.
        params: its parameters.
        inputs: source pieces, 0 is padding.
        max_length: pieces at most, the end included.

    Returns:
        int32 [B, max_length]; 0 after the end.
    """
    variables, module = {"params": params}, model.module
    segments = (inputs > 0).astype(jnp.int32)
    how = {"enable_dropout": False}
    encoded = module.apply(variables, inputs, segments, method=Transformer.encode, **how)
    batch = inputs.shape[0]
    nonempty = jnp.any(inputs > 0, axis=1)

    def extend(carry):
        position, targets, ended = carry
        shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
        # Only what is or was asked for is a token: rows without a source, positions to come and
        # positions after the end are padding, which the router ignores.
        begun = (shifted > 0) & (shifted != END)
        known = (begun.at[:, 0].set(True) & nonempty[:, None]).astype(jnp.int32)
        logits = module.apply(
            variables, encoded, segments, shifted, known, method=Transformer.decode, **how
        )
        likeliest = jnp.argmax(logits[:, position], axis=-1).astype(jnp.int32)
        piece = jnp.where(ended, 0, likeliest)
        return position + 1, targets.at[:, position].set(piece), ended | (piece == END)

    def unfinished(carry):
        position, _, ended = carry
        return (position < max_length) & ~jnp.all(ended)

    start = (0, jnp.zeros((batch, max_length), jnp.int32), ~nonempty)
    _, targets, _ = jax.lax.while_loop(unfinished, extend, start)
    return targets


@dataclass(frozen=True)
class GreedySamples:
    """Translates a few held-out sentences: of a high-, a middle- and a low-resource language.

    Attributes:
        tasks: whose languages and vocabularies are used.
        lengths: tokens in a row, {"inputs": ..., "targets": ...}.
        batch_size: rows to decode in, at least `num_samples`.
        every_steps: steps between samples.
        num_samples: sentences, spread over the languages from high to low resource.
        split: "validation" or "test".
        at_start: also before the first step.
        name: folder below `training_eval/`.
    """

    tasks: TranslationTasks
    lengths: Mapping[str, int]
    batch_size: int
    every_steps: int
    num_samples: int = 3
    split: str = "validation"
    at_start: bool = False
    name: str = "samples"

    def __post_init__(self) -> None:
        require_at_least(self, 1, "batch_size", "every_steps", "num_samples")
        require_one_of(self, SPLITS, "split")
        if self.num_samples > self.batch_size:
            raise SettingError(
                f"num_samples={self.num_samples} do not fit in batch_size={self.batch_size} rows.",
                settings=("num_samples", "batch_size"),
            )

    def __call__(
        self, params: Params, *, model: Seq2SeqModel, mesh: Mesh, rules: Rules, folder: Path
    ) -> tuple[dict[str, float], str]:
        """Translate; see `train.experiment.Evaluator`."""
        import sentencepiece

        chosen = self._choose()
        if not chosen:
            return {}, f"no sentence of {SHORTEST} to {LONGEST} pieces in {self.split}\n"
        source = sentencepiece.SentencePieceProcessor(str(self.tasks.models["inputs"]))
        target = sentencepiece.SentencePieceProcessor(str(self.tasks.models["targets"]))
        examples = [example for _, example in chosen]
        ((rows, batch),) = padded_batches(
            examples, batch_size=self.batch_size, lengths=self.lengths
        )
        outputs = _decode(
            params,
            to_mesh(batch, mesh, rules)["encoder_input_tokens"],
            model=model,
            mesh=mesh,
            rules=rules,
            max_length=self.lengths["targets"],
        )
        lines = []
        for row in rows:
            language, (inputs, targets) = chosen[row]
            lines.append(f"[{language}] {_text(source, inputs)}")
            lines.append(f"  reference: {_text(target, targets)}")
            lines.append(f"  output:    {_text(target, np.asarray(outputs[row]))}")
        return {}, "\n".join(lines) + "\n"

    def _choose(self) -> list[tuple[str, tuple[np.ndarray, np.ndarray]]]:
        """Take a sentence of fair length from languages spread over the scale, none twice."""
        chosen: list[tuple[str, tuple[np.ndarray, np.ndarray]]] = []
        seen: set[bytes] = set()
        for language in _spread(self.tasks.codes, self.num_samples):
            for source, target in self.tasks.token_ids(self.split, language):
                if SHORTEST <= len(target) <= LONGEST and target.tobytes() not in seen:
                    seen.add(target.tobytes())
                    chosen.append((language, (source, target)))
                    break
            if len(chosen) == self.num_samples:
                break
        return chosen


def _spread(languages: Sequence[str], count: int) -> list[str]:
    """Order languages so that the first `count` lie evenly between the first and the last."""
    last = len(languages) - 1
    first = [languages[i * last // max(count - 1, 1)] for i in range(count)] if languages else []
    # The others follow, from the low-resource end, in case one of the first has no sentence.
    return list(dict.fromkeys([*first, *reversed(languages)]))


@functools.partial(jax.jit, static_argnames=("model", "mesh", "rules", "max_length"))
def _decode(params, inputs, *, model, mesh, rules, max_length):
    with partitioning(mesh, rules):
        return greedy_decode(model, params, inputs, max_length=max_length)


def _text(pieces: Any, ids: np.ndarray) -> str:
    """Write ids up to the end piece as text.

    An embedding may have more rows than the vocabulary has pieces; such an id is an unknown piece.
    """
    ids = ids[ids > 0]
    ends = np.flatnonzero(ids == END)
    ids = ids[: ends[0]] if len(ends) else ids
    return pieces.decode(np.where(ids < pieces.vocab_size(), ids, pieces.unk_id()).tolist())

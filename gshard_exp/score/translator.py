"""Translate text with a model on a mesh."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from gshard_exp import axes
from gshard_exp.data.batches import to_mesh
from gshard_exp.data.vocabulary import EOS_ID
from gshard_exp.errors import SettingError, require_at_least
from gshard_exp.model.incremental import Search, StepDecoder
from gshard_exp.sharding.annotate import partitioning
from gshard_exp.sharding.rules import Rules

SHORTEST_BUCKET = 8  # source pieces
# A batch that is less full than this waits for longer sentences.
WORTH_A_BATCH = 0.25


@dataclass(frozen=True)
class Translation:
    """One hypothesis.

    Attributes:
        text: in the target language.
        score: log probability over length penalty; higher is better. 0 for an empty source.
        log_prob: nats, sum over its pieces.
        pieces: of the text, the end included.
        ended: False if it was cut off at the maximum length.
        source_cut: the source had more pieces than the model takes; the rest was left out.
    """

    text: str
    score: float
    log_prob: float
    pieces: int
    ended: bool
    source_cut: bool


@dataclass(frozen=True)
class Translator:
    """A model ready to translate. `gshard_exp.load_translator` makes one of a model directory.

    Sentences of similar length are translated together, in rows as long as the longest of them
    needs; for each shape of a batch the search is compiled once. What a sentence becomes does not
    depend on the sentences beside it, as long as its model drops no tokens when it decodes.

    Attributes:
        decoder: the model.
        search: how to look for hypotheses.
        vocabularies: SentencePiece models of `inputs` and `targets`.
        lengths: pieces at most, {"inputs": ..., "targets": ...}, each end included.
        mesh: where the model lies.
        rules: how.
        batch_size: sentences at once, over all devices.
        languages: names of those that the model was trained on, by code.
    """

    decoder: StepDecoder
    search: Search
    vocabularies: Mapping[str, Path]
    lengths: Mapping[str, int]
    mesh: Mesh
    rules: Rules
    batch_size: int = 32
    languages: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_at_least(self, 1, "batch_size")
        parts = self.rules.partitions(axes.BATCH, self.mesh)
        if self.batch_size % parts:
            raise SettingError(
                f"batch_size={self.batch_size} rows do not divide over the {parts} mesh "
                "partitions of 'batch'.",
                settings=("batch_size",),
                hint=f"Set it to a multiple of {parts}.",
            )

    def translate(self, sentences: Sequence[str]) -> list[Translation]:
        """Translate each sentence; the best hypothesis of each."""
        return [best for best, *_ in self.hypotheses(sentences)]

    def hypotheses(self, sentences: Sequence[str]) -> list[list[Translation]]:
        """Return all hypotheses of each sentence, the best first.

        An empty sentence has one, which is empty.
        """
        source, target = self.processors
        longest = self.lengths["inputs"]
        ids = [source.encode(sentence) for sentence in sentences]
        cut = [len(pieces) >= longest for pieces in ids]
        rows = [[*pieces[: longest - 1], EOS_ID] if pieces else [] for pieces in ids]
        found: list[list[Translation]] = [[Translation("", 0.0, 0.0, 0, True, False)] for _ in rows]
        for batch in batches([len(row) for row in rows], longest, self.batch_size, self._parts):
            inputs = np.zeros((batch.rows, batch.length), np.int32)
            for place, index in enumerate(batch.indices):
                inputs[place, : len(rows[index])] = rows[index]
            results = self._search(inputs)
            for place, index in enumerate(batch.indices):
                found[index] = _translations(results, place, target, cut[index])
        return found

    def _search(self, inputs: np.ndarray) -> Any:
        placed = to_mesh({"inputs": inputs}, self.mesh, self.rules)["inputs"]
        return jax.device_get(
            _compiled_search(
                self.decoder.params,
                placed,
                module=self.decoder.module,
                search=self.search,
                mesh=self.mesh,
                rules=self.rules,
                max_length=self.lengths["targets"],
            )
        )

    @functools.cached_property
    def processors(self) -> tuple[Any, Any]:
        """The SentencePiece processors of source and target."""
        import sentencepiece

        source, target = (
            sentencepiece.SentencePieceProcessor(model_file=str(self.vocabularies[feature]))
            for feature in ("inputs", "targets")
        )
        return source, target

    @property
    def _parts(self) -> int:
        return self.rules.partitions(axes.BATCH, self.mesh)


@dataclass(frozen=True)
class Batch:
    """Which sentences are translated together.

    Attributes:
        indices: of the sentences.
        rows: of the batch, at least as many.
        length: of a row, pieces.
    """

    indices: tuple[int, ...]
    rows: int
    length: int


def batches(lengths: Sequence[int], longest: int, batch_size: int, parts: int) -> Iterator[Batch]:
    """Group sentences by length.

    A sentence goes into the bucket of the next power of two. What is left of a bucket after its
    full batches makes a batch of its own, or joins the next bucket if it is less than a quarter of
    a batch. After full batches it has as many rows as they, filled up with empty ones, which costs
    less than to compile for another shape; otherwise as many as the next power of two.

    Args:
        lengths: pieces of each sentence; sentences of 0 are in no batch.
        longest: length of the last bucket.
        batch_size: rows of a full batch.
        parts: every number of rows is a multiple of it.
    """
    buckets: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        if length:
            buckets.setdefault(min(_power_of_two(length, SHORTEST_BUCKET), longest), []).append(
                index
            )
    waiting: list[int] = []
    order = sorted(buckets)
    for bucket in order:
        waiting += buckets[bucket]
        full = len(waiting) >= batch_size
        while len(waiting) >= batch_size:
            yield Batch(tuple(waiting[:batch_size]), batch_size, bucket)
            waiting = waiting[batch_size:]
        last = bucket == order[-1]
        if waiting and (last or len(waiting) >= WORTH_A_BATCH * batch_size):
            rows = parts * _power_of_two(-(-len(waiting) // parts))
            yield Batch(tuple(waiting), batch_size if full else min(rows, batch_size), bucket)
            waiting = []


def _power_of_two(number: int, least: int = 1) -> int:
    return max(least, 1 << (number - 1).bit_length())


@functools.partial(jax.jit, static_argnames=("module", "search", "mesh", "rules", "max_length"))
def _compiled_search(params, inputs, *, module, search, mesh, rules, max_length):
    with partitioning(mesh, rules):
        return search(StepDecoder(module, params), inputs, max_length=max_length)


def _translations(found: Any, row: int, target: Any, cut: bool) -> list[Translation]:
    """Turn the hypotheses of a row into text; places without one are left out."""
    translations = []
    for tokens, score, log_prob, ended in zip(
        found.tokens[row], found.scores[row], found.log_probs[row], found.ended[row], strict=True
    ):
        if np.isfinite(score):
            pieces = tokens[tokens > 0]
            text = to_text(target, pieces)
            translations.append(
                Translation(text, float(score), float(log_prob), len(pieces), bool(ended), cut)
            )
    return translations


def to_text(vocabulary: Any, ids: np.ndarray) -> str:
    """Write ids up to the end piece as text.

    An embedding may have more rows than the vocabulary has pieces; such an id is an unknown piece.
    """
    ids = ids[ids > 0]
    ends = np.flatnonzero(ids == EOS_ID)
    ids = ids[: ends[0]] if len(ends) else ids
    known = np.where(ids < vocabulary.vocab_size(), ids, vocabulary.unk_id())
    return vocabulary.decode(known.tolist())

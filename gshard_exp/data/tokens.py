"""Token ids of a corpus, encoded once and kept as flat arrays beside it."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from gshard_exp.data import splits
from gshard_exp.data.corpus import BuiltCorpus

INPUTS, TARGETS = "inputs", "targets"
FEATURES = (INPUTS, TARGETS)
# Part of the cache's key: raise it when the arrays are laid out otherwise.
LAYOUT = 1
BATCH = 20_000  # sentences encoded at a time


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one array: row i is `flat[starts[i] : starts[i + 1]]`."""

    flat: np.ndarray  # int32
    starts: np.ndarray  # int64, one more than rows

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.flat[self.starts[row] : self.starts[row + 1]]


@dataclass(frozen=True)
class Tokens:
    """The token ids of a built corpus, the end id (1) closing each sentence, untruncated.

    A split is one pair of flat arrays, memory-mapped, its rows language by language in the order
    of `BuiltCorpus.languages`.
    """

    directory: Path
    corpus: BuiltCorpus

    def rows(self, split: str, language: str) -> range:
        """Return which rows of the split are those of a language."""
        first = 0
        for code in self.corpus.languages:
            count = self.corpus.num_pairs(split, code)
            if code == language:
                return range(first, first + count)
            first += count
        raise KeyError(language)

    def load(self, split: str, feature: str) -> Ragged:
        """Return the rows of a split, `inputs` or `targets`."""
        stem = str(self.directory / f"{split}-{feature}")
        return Ragged(np.load(f"{stem}-flat.npy", mmap_mode="r"), np.load(f"{stem}-starts.npy"))

    def pairs(self, split: str, language: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (inputs ids, targets ids) of each pair, int32, in the order of the corpus."""
        inputs, targets = self.load(split, INPUTS), self.load(split, TARGETS)
        return [
            (np.array(inputs[row]), np.array(targets[row])) for row in self.rows(split, language)
        ]


def encode(corpus: BuiltCorpus, models: dict[str, Path], progress: bool = True) -> Tokens:
    """Encode a corpus, unless that lies in its folder already.

    Args:
      corpus: the corpus.
      models: SentencePiece model of `inputs` and of `targets`.
      progress: say on standard error what is done.
    """
    digest = hashlib.sha256(str(LAYOUT).encode())
    for feature in FEATURES:
        digest.update(models[feature].read_bytes())
    place = corpus.directory / f"tokens-{digest.hexdigest()[:16]}"
    if not place.exists():
        draft = place.with_name(f".{place.name}.{os.getpid()}")
        console = Console(stderr=True)
        note = "tokens: encoding the corpus"
        try:
            draft.mkdir(exist_ok=True)
            with console.status(note) if progress else contextlib.nullcontext():
                for split in splits.SPLITS:
                    for column, feature in enumerate(FEATURES):
                        _write(corpus, split, column, models[feature], draft / f"{split}-{feature}")
            try:
                draft.rename(place)
            except OSError:
                # Another process may have been quicker; its arrays are the same.
                if not place.exists():
                    raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        if progress:
            console.print(f"{note}: done")
    return Tokens(place, corpus)


def _write(corpus: BuiltCorpus, split: str, column: int, model: Path, stem: Path) -> None:
    sentences = (
        pair[column] for language in corpus.languages for pair in corpus.pairs(split, language)
    )
    flats, lengths = [np.zeros(0, np.int32)], [np.zeros(1, np.int64)]
    for batch in _batches(sentences, model):
        lengths.append(np.fromiter(map(len, batch), np.int64, len(batch)))
        flats.append(np.concatenate([np.asarray(ids, np.int32) for ids in batch]))
    np.save(f"{stem}-flat.npy", np.concatenate(flats))
    np.save(f"{stem}-starts.npy", np.cumsum(np.concatenate(lengths)))


def _batches(sentences: Iterator[str], model: Path) -> Iterator[list[list[int]]]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    batch: list[str] = []
    for sentence in sentences:
        batch.append(sentence)
        if len(batch) == BATCH:
            yield processor.encode(batch, add_eos=True)
            batch = []
    if batch:
        yield processor.encode(batch, add_eos=True)

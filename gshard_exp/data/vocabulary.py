"""SentencePiece vocabularies trained on the training split, and a user's own."""

import contextlib
import hashlib
import io
import os
import random
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gshard_exp.data import splits
from gshard_exp.data.corpus import BuiltCorpus
from gshard_exp.errors import SettingError

SOURCE = "source"
TARGET = "target"
PAD_ID, EOS_ID, UNK_ID = 0, 1, 2  # as in T5; there is no BOS
# Part of the cache's key: raise it when the same settings would give another model.
VERSION = 1


class VocabularyError(SettingError):
    """A vocabulary that cannot be trained or read as it is set up."""


@dataclass(frozen=True)
class SentencePieceVocabulary:
    """A unigram SentencePiece vocabulary, trained on first use or given as a file.

    Trained on a sample of the training split, drawn per language in proportion to
    pairs^(1/temperature), so that the pieces of a small language are not crowded out; the English
    side is one language and is sampled evenly over distinct sentences. Same corpus and settings
    give the same bytes: the sample is drawn by a seeded generator and the trainer runs in one
    thread, since the sums of several depend on their number.

    Characters beyond `character_coverage`, rare Han above all, are spelt in bytes (256 pieces of
    the vocabulary), so that no text has an unknown piece.

    Attributes:
      size: pieces, with pad (0), end (1), unknown (2) and the 256 bytes. A soft limit: a corpus
        too small for so many gets fewer, and the model on disk says how many.
      model_file: a `.model` of one's own instead; nothing is trained and `size` is not looked at.
        Its pad, end and unknown ids must be 0, 1 and 2.
      max_sentences: sentences in the sample.
      temperature: of the sample over languages; 1 = as they are, large = all alike.
      character_coverage: fraction of the sample's characters that get a piece of their own.
      seed: of the sample.
    """

    size: int = 8000
    model_file: str | None = None
    max_sentences: int = 50_000
    temperature: float = 5.0
    character_coverage: float = 0.9995
    seed: int = 0

    def path(self, corpus: BuiltCorpus, side: str, progress: bool = True) -> Path:
        """Return the model file, training it if it is not in the cache.

        Args:
          corpus: the corpus whose training split it is trained on.
          side: `source`, all languages, or `target`, English.
          progress: say on standard error what takes so long.

        Raises:
          VocabularyError: the size cannot be met, or `model_file` is unfit.
        """
        if self.model_file is not None:
            return _checked(Path(self.model_file).expanduser())
        key = hashlib.sha256(f"{VERSION} {side} {self!r} {corpus.key}".encode()).hexdigest()[:16]
        place = corpus.directory / f"{side}-{key}.model"
        if not place.exists():
            sentences = self.sample(corpus, side)
            note = f"vocabulary: training {self.size} {side} pieces on {len(sentences)} sentences"
            console = Console(stderr=True)
            with console.status(note) if progress else contextlib.nullcontext():
                model = self._train(sentences, side)
            if progress:
                console.print(f"{note}: done")
            draft = place.with_name(f".{place.name}.{os.getpid()}")
            draft.write_bytes(model)
            draft.replace(place)
        return place

    def sample(self, corpus: BuiltCorpus, side: str) -> list[str]:
        """Return the sentences that the vocabulary is trained on."""
        if side == TARGET:
            distinct = dict.fromkeys(
                target
                for language in corpus.languages
                for _, target in corpus.pairs(splits.TRAIN, language)
            )
            return self._choose(list(distinct), self.max_sentences)
        counts = {code: corpus.num_pairs(splits.TRAIN, code) for code in corpus.languages}
        quota = self._quotas(counts)
        return [
            sentence
            for code in corpus.languages
            for sentence in self._choose(
                [s for s, _ in corpus.pairs(splits.TRAIN, code)], quota[code]
            )
        ]

    def _choose(self, sentences: list[str], count: int) -> list[str]:
        if len(sentences) <= count:
            return sentences
        return random.Random(self.seed).sample(sentences, count)

    def _quotas(self, counts: dict[str, int]) -> dict[str, int]:
        """Split `max_sentences` over languages by count^(1/temperature), none above its count.

        What a small language cannot fill is split again over the others.
        """
        weights = {code: count ** (1 / self.temperature) for code, count in counts.items()}
        quotas: dict[str, int] = {}
        left, weight = self.max_sentences, sum(weights.values())
        # From the smallest language on: whoever is given all it has leaves more to the rest.
        for code in sorted(counts, key=lambda code: (counts[code], code)):
            quotas[code] = min(counts[code], max(1, round(left * weights[code] / weight)))
            left -= quotas[code]
            weight -= weights[code]
        return quotas

    def _train(self, sentences: list[str], side: str) -> bytes:
        import sentencepiece

        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                model_type="unigram",
                vocab_size=self.size,
                hard_vocab_limit=False,
                character_coverage=self.character_coverage,
                byte_fallback=True,
                pad_id=PAD_ID,
                eos_id=EOS_ID,
                unk_id=UNK_ID,
                bos_id=-1,
                num_threads=1,
                shuffle_input_sentence=False,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise VocabularyError(
                f"SentencePiece cannot train {self.size} {side} pieces on {len(sentences)} "
                f"sentences: {error}. A vocabulary holds 259 control and byte pieces and every "
                "character that is covered.",
                settings=("size", "character_coverage"),
                hint="Raise size, lower character_coverage, or use a larger corpus.",
            ) from error
        return model.getvalue()


def _checked(path: Path) -> Path:
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise VocabularyError(
            f"{path} is no SentencePiece model: {error}. model_file takes the name of a file "
            "that sentencepiece has trained.",
            settings=("model_file",),
            hint="Correct it, or leave it out to have one trained.",
        ) from error
    ids = (processor.pad_id(), processor.eos_id(), processor.unk_id())
    if ids != (PAD_ID, EOS_ID, UNK_ID):
        raise VocabularyError(
            f"{path} has pad, end and unknown at {ids}; the ids must be (0, 1, 2), as padding is "
            "told by 0.",
            settings=("model_file",),
            hint="Train it with pad_id=0, eos_id=1, unk_id=2, bos_id=-1.",
        )
    return path

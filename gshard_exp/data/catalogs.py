"""Readers of gettext catalogs, `.po` and `.mo`, that report what is malformed and go on."""

import codecs
import gettext
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

# `report(line, what)`; line 0 is the file as a whole.
Report = Callable[[int, str], None]
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
ESCAPE = re.compile(r"\\(.)")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
DEFAULT_COMMENT = re.compile(r'^Default: "(.*)"$', re.M | re.S)


@dataclass
class Message:
    """One message of a catalog.

    Attributes:
      line: where it begins; in a `.mo`, which has no lines, its number in the file.
      msgid: the message in the language of the program, mostly English.
      plural: its plural, or None.
      strings: the translations, one per plural form.
      comments: the extracted comments (`#.`), joined by newlines.
      fuzzy: a translation that a tool guessed and nobody has confirmed.
    """

    line: int
    msgid: str = ""
    plural: str | None = None
    strings: dict[int, str] = field(default_factory=dict)
    comments: str = ""
    fuzzy: bool = False


class Plurals:
    """The plural formula of a catalog, from its header."""

    def __init__(self, header: str, report: Report):
        """Parse `Plural-Forms`; without a usable one, form 0 is the singular and 1 the plural."""
        self._form: Callable[[int], int] | None = None
        match = re.search(r"^Plural-Forms:.*?plural\s*=\s*([^;\n]+)", header, re.M | re.I)
        if match:
            try:
                self._form = gettext.c2py(match[1])
                self._form(1)
            except (ValueError, ArithmeticError) as error:
                report(0, f"plural formula {match[1]!r}: {error}")
                self._form = None

    def pairs(self, message: Message) -> Iterator[tuple[str, str]]:
        """Yield (translation, English), each form with the English number that it is used for."""
        if message.plural is None:
            yield message.strings.get(0, ""), message.msgid
            return
        form = self._form or (lambda n: int(n != 1))
        singular = form(1)
        # 2, 5 and 100 reach the forms for few, many and other of all languages in use.
        many = {form(n) for n in (2, 5, 100)}
        if singular not in many:
            yield message.strings.get(singular, ""), message.msgid
        for number in sorted(many):
            yield message.strings.get(number, ""), message.plural


def english_of(message: Message) -> str:
    """Return the English of a message whose msgid is a key, empty if it has none.

    It stands in a `Default: "..."` comment; without one, a msgid with a space in it is English.
    """
    match = DEFAULT_COMMENT.search(message.comments)
    if match:
        return match[1].replace('\\"', '"')
    return message.msgid if " " in message.msgid else ""


def charset(header: bytes) -> str:
    """Return the charset that a catalog's header declares, UTF-8 without one."""
    match = re.search(rb"charset=([\w.:-]+)", header)
    name = match[1].decode("ascii", "replace") if match else "utf-8"
    return "utf-8" if name.upper() == "CHARSET" else name


def read_mo(data: bytes, report: Report) -> tuple[str, list[Message]]:
    """Read a compiled catalog.

    Returns:
      The header and the messages; contexts (before `\\x04`) are cut off.

    Raises:
      ValueError: no catalog at all, or a charset that its bytes contradict.
    """
    if len(data) < 28:
        raise ValueError(f"{len(data)} bytes are too few for a .mo catalog")
    order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}.get(data[:4])
    if order is None:
        raise ValueError(
            f"starts with {data[:4]!r}, which is not the magic number of a .mo catalog"
        )
    count, ids_at, strings_at = struct.unpack_from(order + "3I", data, 8)
    if max(ids_at, strings_at) + 8 * count > len(data):
        raise ValueError(f"is cut off: {count} messages announced, {len(data)} bytes in all")
    ids = struct.unpack_from(f"{order}{2 * count}I", data, ids_at)
    strings = struct.unpack_from(f"{order}{2 * count}I", data, strings_at)
    header, encoding = "", "utf-8"
    messages = []
    for i in range(count):
        raw_id = data[ids[2 * i + 1] :][: ids[2 * i]]
        raw_string = data[strings[2 * i + 1] :][: strings[2 * i]]
        if not raw_id:
            encoding = charset(raw_string)
            header = raw_string.decode(_known(encoding), "replace")
            continue
        try:
            msgid, _, plural = raw_id.decode(encoding).partition("\0")
            forms = raw_string.decode(encoding).split("\0")
        except UnicodeDecodeError as error:
            report(i, str(error))
            continue
        has_plural = b"\0" in raw_id
        messages.append(
            Message(
                line=i,
                msgid=msgid.rpartition("\x04")[2],
                plural=plural if has_plural else None,
                strings=dict(enumerate(forms)),
            )
        )
    return header, messages


def _known(encoding: str) -> str:
    try:
        "".encode(encoding)
    except LookupError:
        raise ValueError(f"declares the charset {encoding!r}, which Python does not know") from None
    return encoding


def read_po(data: bytes, report: Report) -> tuple[str, list[Message]]:
    """Read a `.po` catalog; obsolete (`#~`) messages are left out.

    Returns:
      The header and the messages, in order.

    Raises:
      ValueError: the header declares a charset that Python does not know.
    """
    # The header is the first message; a charset= further down is somebody's text.
    encoding = _known(charset(data))
    parser = _PoParser(report)
    for number, raw in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        try:
            line = raw.decode(encoding)
        except UnicodeDecodeError as error:
            report(number, str(error))
            # U+FFFD marks the message, the others of the file are kept.
            line = raw.decode(encoding, "replace")
        parser.feed(number, line.strip())
    parser.end_message()
    return parser.header, parser.messages


class _PoParser:
    """A state machine over the lines of a `.po` file."""

    def __init__(self, report: Report):
        self.header = ""
        self.messages: list[Message] = []
        self._report = report
        self._message: Message | None = None
        self._broken = False
        self._comments: list[str] = []
        self._fuzzy = False
        self._target: tuple[str, int] = ("", 0)
        self._parts: list[str] = []

    def feed(self, number: int, line: str) -> None:
        """Take one stripped line."""
        if line.startswith('"'):
            self._append(number, line)
        elif not line:
            self.end_message()
            self._comments, self._fuzzy = [], False
        elif line.startswith("#"):
            if self._target[0] == "msgstr":
                self.end_message()
            if line.startswith("#~"):
                self._comments, self._fuzzy = [], False
            elif line.startswith("#."):
                self._comments.append(line[2:].strip())
            elif line.startswith("#,"):
                self._fuzzy |= "fuzzy" in line
        else:
            self._keyword(number, line)

    def _keyword(self, number: int, line: str) -> None:
        keyword, _, rest = line.partition(" ")
        if not rest and '"' in keyword:
            keyword, quote, rest = line.partition('"')
            rest = quote + rest
        if keyword in ("msgctxt", "msgid") and self._target[0] not in ("", "msgctxt"):
            self.end_message()
        if self._message is None:
            self._message = Message(number, comments="\n".join(self._comments), fuzzy=self._fuzzy)
            self._comments, self._fuzzy = [], False
        self._close_string()
        index = 0
        if keyword.startswith("msgstr["):
            keyword, _, form = keyword.partition("[")
            index = int(form[:-1]) if form[:-1].isdigit() else -1
        if keyword not in ("msgctxt", "msgid", "msgid_plural", "msgstr") or index < 0:
            self._fail(number, f"unknown keyword {line[:40]!r}")
            return
        self._target = (keyword, index)
        self._append(number, rest.strip())

    def _append(self, number: int, quoted: str) -> None:
        if not self._target[0] or not QUOTED.fullmatch(quoted):
            self._fail(number, f"not a quoted string: {quoted[:40]!r}")
        elif "\\" in quoted:
            self._parts.append(ESCAPE.sub(lambda m: ESCAPES.get(m[1], m[1]), quoted[1:-1]))
        else:
            self._parts.append(quoted[1:-1])

    def _fail(self, number: int, what: str) -> None:
        self._report(number, what)
        self._broken = True

    def _close_string(self) -> None:
        keyword, index = self._target
        text = "".join(self._parts)
        self._parts = []
        if self._message is None or not keyword:
            return
        if keyword == "msgid":
            self._message.msgid = text
        elif keyword == "msgid_plural":
            self._message.plural = text
        elif keyword == "msgstr":
            self._message.strings[index] = text

    def end_message(self) -> None:
        """Finish the message that was being read, if any."""
        self._close_string()
        message, self._message = self._message, None
        self._target = ("", 0)
        broken, self._broken = self._broken, False
        if message is None or broken:
            return
        if not message.msgid:
            self.header = self.header or message.strings.get(0, "")
        elif "\ufffd" not in message.msgid + "".join(message.strings.values()):
            self.messages.append(message)

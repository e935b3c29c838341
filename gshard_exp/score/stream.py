"""Translate lines as they come, in their order."""

import itertools
from collections.abc import Callable, Iterable, Iterator

from gshard_exp.score.translator import Translation, Translator

LINES_AT_ONCE = 256


def decoded_lines(lines: Iterable[bytes], warn: Callable[[str], None]) -> Iterator[str]:
    """Decode UTF-8 line by line; what is not UTF-8 is reported and marked, and the rest goes on."""
    for number, line in enumerate(lines, start=1):
        line = line.rstrip(b"\r\n")
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            warn(
                f"line {number}: byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8; "
                "such bytes are replaced by U+FFFD"
            )
            yield line.decode("utf-8", errors="replace")


def translate_lines(
    translator: Translator,
    lines: Iterable[str],
    warn: Callable[[str], None],
    at_once: int = LINES_AT_ONCE,
) -> Iterator[tuple[str, list[Translation]]]:
    """Yield each line and its hypotheses, the best first; an empty line gets an empty one.

    Args:
        translator: does it.
        lines: in their order.
        warn: is told of lines that are too long.
        at_once: lines to read before any is translated, so that lines of like length go together.
    """
    numbered = enumerate(lines, start=1)
    while part := list(itertools.islice(numbered, at_once)):
        found = translator.hypotheses([line.strip() for _, line in part])
        for (number, line), hypotheses in zip(part, found, strict=True):
            if hypotheses[0].source_cut:
                warn(
                    f"line {number}: longer than the {translator.lengths['inputs'] - 1} pieces "
                    "that the model takes; the rest was left out"
                )
            yield line, hypotheses

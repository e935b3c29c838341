"""Columns of text."""

from collections.abc import Collection, Sequence


def columns(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()
) -> list[str]:
    """Lay cells out in columns; `right` are aligned there, the last is as long as it is."""
    widths = [max(map(len, cells)) for cells in zip(heads, *rows, strict=True)]
    lines = []
    for row in (heads, *rows):
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines

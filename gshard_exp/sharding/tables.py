"""Columns of text."""

from collections.abc import Collection, Sequence


def columns(rows: Sequence[Sequence[str]], *, right: Collection[int] | None = None) -> list[str]:
    """Lay rows of cells out, the heads first; blanks at the end of a line are cut.

    Args:
        rows: of as many cells each.
        right: columns that are aligned there; None: all but the first.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    right = range(1, len(widths)) if right is None else right
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines

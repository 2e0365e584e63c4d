"""Tables in Markdown, printed row by row."""

from __future__ import annotations

from collections.abc import Sequence


def head(titles: Sequence[str], widths: Sequence[int]) -> str:
    """The head of a table and the line below it."""
    return row(titles, widths) + "\n|" + "|".join("-" * (width + 2) for width in widths) + "|"


def row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A row of a table; cells are filled up to the widths."""
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "| " + " | ".join(padded) + " |"

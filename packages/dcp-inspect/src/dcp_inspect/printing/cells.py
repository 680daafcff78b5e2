"""Cells: texts with an optional style, of which lines and tables are made. Nothing here prints."""

from __future__ import annotations

from dcp_manifest import printable

__all__ = ["Cell", "cell_text"]

Cell = str | tuple[str, str]
"""A text, or a text and its style. A text is one line: a line break in it is escaped."""


def cell_text(cell: Cell) -> str:
    """Return the text of a cell as it is printed, without its style."""
    return printable(cell if isinstance(cell, str) else cell[0])

"""Lines that are wider than a terminal, broken between words: no name, quoted text, shape or size is broken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dcp_inspect.printing.cells import Cell, cell_text

__all__ = ["wrapped"]

_INDENT = "  "
_WORDS = re.compile(
    r"""\s*(?:
        [(\[{]*'[^']*'\S*                            # what is in quotes, and a comma after it
        | [(\[{]*`[^`]*`\S*                          # a command
        | \S+(?:\ ×\ \S+)+                          # a shape
        | [\d.,]+\ \S+                              # a number with its unit, or what it counts
        | \S+
    )|\s+""",
    re.VERBOSE,
)
"""A word with the blanks before it."""
_PLAIN_WORDS = re.compile(r"\s*\S+|\s+")
_GUIDES = re.compile(r"[│ ]*(?:├── |└── )?")


def wrapped(cells: Sequence[Cell], width: int) -> Iterator[list[Cell]]:
    """Yield the lines that show a line on a terminal; a word that is wider than the terminal is not broken.

    Args:
        cells: Styled parts of the line; parts in bold are names, which are kept whole.
        width: Width of the terminal in columns.
    """
    from rich.cells import cell_len  # noqa: PLC0415 - not needed for files and pipes

    guides = _GUIDES.match(cell_text(cells[0]) if cells else "")
    before = ("" if guides is None else guides[0].replace("├── ", "│   ").replace("└── ", "    ")) + _INDENT
    line: list[Cell] = []
    taken = 0
    for text, style in _words(cells, width - cell_len(before)):
        size = cell_len(text)
        if line and taken + size > width and taken > cell_len(before) and text.strip():
            yield _without_blanks_at_the_end(line)
            line, text = [before], text.lstrip()
            taken, size = cell_len(before), cell_len(text)
        line.append((text, style) if style else text)
        taken += size
    yield line


def _without_blanks_at_the_end(line: list[Cell]) -> list[Cell]:
    while len(line) > 1 and not cell_text(line[-1]).strip():
        line = line[:-1]
    return line


def _words(cells: Sequence[Cell], room: int) -> Iterator[tuple[str, str]]:
    """Yield the words of a line, each with the blanks before it and its style; long commands as several words."""
    for number, cell in enumerate(cells):
        text, style = cell_text(cell), "" if isinstance(cell, str) else cell[1]
        if "bold" in style or (not number and _GUIDES.fullmatch(text)):
            yield text, style
        else:
            for found in _WORDS.findall(text):
                parts = [found] if len(found.strip()) <= room else _PLAIN_WORDS.findall(found)
                yield from ((part, style) for part in parts)

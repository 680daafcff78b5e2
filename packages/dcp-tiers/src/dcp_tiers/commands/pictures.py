"""Text pictures for terminals: a bar for each copy of a checkpoint, in characters that the stream can encode."""

from __future__ import annotations

import sys

from dcp_manifest import printable

__all__ = ["bar", "line"]

_WIDTH = 10


def bar(part: float) -> str:
    """Return a bar of ten cells of which a part, from 0 to 1, is filled."""
    full, empty = ("\u2588", "\u00b7") if _can_print("\u2588\u00b7") else ("#", ".")
    filled = min(_WIDTH, int(part * _WIDTH))
    return full * filled + empty * (_WIDTH - filled)


def line(*cells: str, widths: tuple[int, ...] = ()) -> str:
    """Return cells, padded to widths, as a line for the terminal; control characters in them are escaped."""
    padded = [cell.ljust(widths[at]) if at < len(widths) else cell for at, cell in enumerate(map(printable, cells))]
    return "  ".join(padded).rstrip()


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True

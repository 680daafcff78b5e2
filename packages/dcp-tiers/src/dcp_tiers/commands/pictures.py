"""Text pictures for terminals: a bar for each copy of a checkpoint, in characters that the stream can encode."""

from __future__ import annotations

import sys

from dcp_manifest import printable

__all__ = ["bar", "line"]


def bar(part: float, cells: int = 10) -> str:
    """Return a bar of some cells of which a part, from 0 to 1, is filled."""
    full, empty = ("\u2588", "\u00b7") if _can_print("\u2588\u00b7") else ("#", ".")
    filled = min(cells, int(part * cells))
    return full * filled + empty * (cells - filled)


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

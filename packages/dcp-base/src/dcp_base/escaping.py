"""Escape text for terminals and logs, since names in a checkpoint may contain control characters; format sizes."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(text: str, *, keep: str = "") -> str:
    r"""Replace unprintable characters by Python escape sequences, such as `\x1b` or `\u202e`.

    These are control characters (C0, C1, DEL), line and paragraph separators, characters that reorder or hide text
    (bidirectional overrides, zero-width characters), lone surrogates, and blanks other than the space. Characters in
    `keep`, such as the line break, are not escaped.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def printable_bytes(count: int) -> str:
    """Format a number of bytes with three digits, e.g. `1.46 GiB`."""
    size, unit = float(count), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    if unit == 0:
        return f"{count} B"
    return f"{size:.{2 if size < 10 else 1 if size < 100 else 0}f} {_UNITS[unit]}"

"""Escaping of text for terminals, logs and pages: names in a checkpoint may contain control characters.

All output of the command `dcp` and all error messages of this project are escaped by `printable`.
"""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str, *, keep: str = "") -> str:
    r"""Replace unprintable characters by Python escape sequences, such as `\x1b` or `\u202e`.

    Unprintable are control characters (C0, C1, DEL), line and paragraph separators, characters that reorder or hide
    text (bidirectional overrides, zero-width characters), lone surrogates, and blanks other than the space.

    Args:
        text: Any string, of any length.
        keep: Characters that are not escaped, such as the line break in a text of several lines.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

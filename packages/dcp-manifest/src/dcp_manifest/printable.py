"""Escaping of text for terminals, logs and pages: names in a checkpoint may hold control characters.

Everything that the command prints goes through this, and so do the messages of this project's errors.
"""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the text with unprintable characters as escape sequences of Python, such as `\x1b` or `\u202e`.

    Escaped are control characters (C0, C1, DEL), line and paragraph separators, what reorders or hides text
    (bidirectional overrides, zero-width characters), lone surrogates, and blanks other than the space.

    Args:
        text: Any string, of any length.
        keep: Characters that stay as they are: a line break, where the text is a block of lines.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

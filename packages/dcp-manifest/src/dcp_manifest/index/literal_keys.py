"""Dict keys that are no strings, as path elements: the text that stock writes for them, and the key of such a text.

Stock names a value by `str(key)` and keeps nothing else of the key. For plain literals (numbers, bool, None, bytes,
tuples of those and of strings) that text says which key it was, so that a load without a template restores it.
"""

from __future__ import annotations

import ast
from typing import Any

__all__ = ["LiteralKey"]

_LITERALS = (bool, int, float, complex, bytes, type(None))
_MAX_CHARACTERS = 4096


class LiteralKey(str):
    """The text of a dict key that was a plain literal other than a string; compares and hashes as that text.

    Example:
        ```python
        from dcp_manifest import LiteralKey

        key = LiteralKey.of((0, "weight"))
        assert key == "(0, 'weight')"  # the text that stock writes
        assert key.value == (0, "weight")
        ```
    """

    __slots__ = ()

    @classmethod
    def of(cls, key: object) -> LiteralKey | None:
        """Make the path element of a dict key; None if its text does not tell which key it was.

        Raises:
            ValueError: The text of a number is longer than Python converts.
        """
        if type(key) is int:
            return cls(repr(key))
        if not _is_literal(key):
            return None
        element = cls(repr(key))
        return element if repr(element.value) == element else None

    @property
    def value(self) -> Any:
        """The key, or the text as a plain `str` where it is not the text of a literal."""
        text = str(self)
        if len(text) <= _MAX_CHARACTERS:
            try:
                key = int(text) if text.removeprefix("-").isdecimal() else ast.literal_eval(text)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, Warning):
                return text
            if _is_literal(key) and repr(key) == text:
                return key
        return text


def _is_literal(key: object) -> bool:
    if type(key) is tuple:
        return all(type(part) is str or _is_literal(part) for part in key)
    return type(key) in _LITERALS

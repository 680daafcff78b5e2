"""Dict keys other than strings as path elements.

Stock stores only `str(key)`. A load without a template restores plain literals (numbers, bool, None, bytes, tuples of
these and of strings) from this text.
"""

from __future__ import annotations

import ast
from typing import Any

_LITERALS = (bool, int, float, complex, bytes, type(None))
_MAX_CHARACTERS = 4096


class LiteralKey(str):
    """Text of a dict key that is a literal other than a string; `value` is the key.

    Example:
        ```python
        from dcp_manifest.index.literal_keys import LiteralKey

        key = LiteralKey.of((0, "weight"))
        assert key == "(0, 'weight')"  # the text that stock writes
        assert key.value == (0, "weight")
        ```
    """

    __slots__ = ()

    @classmethod
    def of(cls, key: object) -> LiteralKey | None:
        """Return a dict key's path element; None if its text does not restore it.

        Raises ValueError for a number with too many digits.
        """
        if type(key) is int:
            return cls(repr(key))
        if not _is_literal(key):
            return None
        element = cls(repr(key))
        return element if repr(element.value) == element else None

    @property
    def value(self) -> Any:
        """The dict key; if the text is not a literal, a plain `str`."""
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

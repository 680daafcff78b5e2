"""Suggestions for a misspelled name, fast even among 200,000 names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

__all__ = ["near"]

_COMPARED_NAMES = 2000
_COMPARED_LETTERS = 300


def near(name: str, candidates: Iterable[str]) -> list[str]:
    """Return up to three candidates with a similar spelling; names of very different length are not compared."""
    if len(name) > _COMPARED_LETTERS:
        return []
    alike = (each for each in candidates if abs(len(each) - len(name)) <= max(3, len(name) // 2))
    return difflib.get_close_matches(name, islice(alike, _COMPARED_NAMES), 3)

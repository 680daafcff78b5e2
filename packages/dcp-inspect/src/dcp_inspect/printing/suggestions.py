"""Suggestions of names near one that is missing, quickly also among 200,000 of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

__all__ = ["near"]

_COMPARED_NAMES = 2000
_COMPARED_LETTERS = 300


def near(name: str, candidates: Iterable[str]) -> list[str]:
    """Up to three names that are spelled like one; those of very different lengths are not compared."""
    if len(name) > _COMPARED_LETTERS:
        return []
    alike = (each for each in candidates if abs(len(each) - len(name)) <= max(3, len(name) // 2))
    return difflib.get_close_matches(name, islice(alike, _COMPARED_NAMES), 3)

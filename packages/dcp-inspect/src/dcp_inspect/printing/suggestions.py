"""Suggestions for a misspelled name, fast even among 200,000 names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from itertools import islice

__all__ = ["hint", "near"]

_COMPARED_NAMES = 2000
_COMPARED_LETTERS = 300


def near(name: str, candidates: Iterable[str]) -> list[str]:
    """Return up to three candidates with a similar spelling; names of very different length are not compared."""
    if len(name) > _COMPARED_LETTERS:
        return []
    alike = (each for each in candidates if abs(len(each) - len(name)) <= max(3, len(name) // 2))
    return difflib.get_close_matches(name, islice(alike, _COMPARED_NAMES), 3)


def hint(path: str, name: str, candidates: Collection[str]) -> str:
    """Return the part of a message that says what a name may mean; an empty text if nothing is like it.

    Args:
        path: Path or URI of the checkpoint.
        name: Name or pattern that is not among the candidates.
        candidates: Names that there are.
    """
    below = sum(each.startswith(f"{name}.") for each in candidates)
    if below:
        return f"; {below} value{'s are' if below > 1 else ' is'} below it: `dcp show {path} '{name}.*'`"
    found = near(name, candidates)
    return f"; near it: {', '.join(found)}" if found else ""

"""Lists of plan items that are converted between stock's and our classes on first access.

Most functions that get a plan change one of its fields and never read its items, which then are not converted at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from dcp_core.toolkit import LazyList

__all__ = ["converted"]

A = TypeVar("A")
B = TypeVar("B")


class _Converted(Generic[A, B]):
    """Source of a `LazyList` of `convert(item)` for each item of `items`, which must not change."""

    def __init__(self, items: list[A], convert: Callable[[A], B]) -> None:
        self.items = items
        self._convert = convert

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[B]:
        # Walking a lazy list itself would make it an ordinary one, and the plan would lose its columns.
        source = self.items.source if isinstance(self.items, LazyList) else None
        return map(self._convert, self.items if source is None else source)


def converted(items: list[A], convert: Callable[[A], B]) -> list[B]:
    """Return a list of `convert(item)` for each item, converted on first access.

    If `items` is itself a converted list, and none of its items was read, its original list is returned.
    """
    source = items.source if isinstance(items, LazyList) else None
    if isinstance(source, _Converted):
        return source.items
    return LazyList(_Converted(items, convert))

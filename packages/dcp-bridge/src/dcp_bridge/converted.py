"""Lists of plan items that are converted between stock's and our classes on first access: most are never read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from dcp_core.records.lazy import LazyList

A = TypeVar("A")
B = TypeVar("B")


class _Converted(Generic[A, B]):
    def __init__(self, items: list[A], convert: Callable[[A], B]) -> None:
        self.items = items
        self._convert = convert

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[B]:
        # Iterating over a lazy list would convert it to an ordinary list without columns.
        source = self.items.source if isinstance(self.items, LazyList) else None
        return map(self._convert, self.items if source is None else source)


def converted(items: list[A], convert: Callable[[A], B]) -> list[B]:
    """Return a list of `convert(item)`, converted on first access, or the unread original of such a list."""
    source = items.source if isinstance(items, LazyList) else None
    if isinstance(source, _Converted):
        return source.items
    return LazyList(_Converted(items, convert))

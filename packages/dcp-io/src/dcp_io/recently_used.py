"""`RecentlyUsed`: a bounded cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class RecentlyUsed(Generic[K, T]):
    """Cache of `size` values that evicts the least recently used ones (LRU); thread-safe.

    It may hold more values up to the total weight `free_weight`; `weigh` returns a value's weight, such as its size in
    bytes.
    """

    def __init__(self, size: int, *, weigh: Callable[[T], int] = lambda _: 1, free_weight: int = 0) -> None:
        self._size = size
        self._weigh = weigh
        self._free_weight = free_weight
        self._values: OrderedDict[K, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> T | None:
        """Return and renew a value; None if it is missing."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: K, value: T) -> list[K]:
        """Add a value; returns the evicted keys."""
        evicted = []
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._size and sum(map(self._weigh, self._values.values())) > self._free_weight:
                evicted.append(self._values.popitem(last=False)[0])
        return evicted

    def drop(self, key: K) -> None:
        """Remove `key`, if present."""
        with self._lock:
            self._values.pop(key, None)

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            self._values.clear()

    def __len__(self) -> int:
        return len(self._values)

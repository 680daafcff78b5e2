"""Lazy dict and lazy list: their values are made when they are first looked up.

They *are* a dict and a list: they compare, copy, pickle and mutate like ordinary ones. Looking up single keys of the
dict makes only their values; an operation that needs all values, or changes the dict, makes all of them first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, KeysView
from typing import Any, Protocol, TypeVar

__all__ = ["LazyDict", "LazyList", "LazyListSource", "LazySource"]

K = TypeVar("K")
V = TypeVar("V")
K_co = TypeVar("K_co", covariant=True)
V_co = TypeVar("V_co", covariant=True)


class LazySource(Protocol[K_co, V_co]):
    """The source of a `LazyDict`'s values; its contents never change."""

    def __len__(self) -> int:
        """Return the number of keys."""
        ...

    def make(self, key: object) -> V_co:
        """Return the value of one key. Raises KeyError if there is none."""
        ...

    def has(self, key: object) -> bool:
        """Whether there is that key."""
        ...

    def keys(self) -> Iterator[K_co]:
        """Yield every key, in order, each once."""
        ...

    def items(self) -> Iterator[tuple[K_co, V_co]]:
        """Yield every key with its value, in order, each key once."""
        ...


class LazyDict(dict[K, V]):
    """A dict over a `LazySource`. Values keep their identity: a second look-up gives the same object.

    Safe to read from several threads.
    """

    __slots__ = ("_lock", "_source")

    def __init__(self, source: LazySource[K, V]) -> None:
        super().__init__()
        self._source: LazySource[K, V] | None = source
        self._lock = threading.RLock()

    def __missing__(self, key: K) -> V:
        with self._lock:
            if super().__contains__(key):
                return super().__getitem__(key)
            if self._source is None:
                raise KeyError(key)
            value = self._source.make(key)
            super().__setitem__(key, value)
            return value

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of `key`, or `default` if there is none."""
        try:
            return self[key]
        except KeyError:
            return default

    def __contains__(self, key: object) -> bool:
        source = self._source
        return super().__contains__(key) if source is None else source.has(key)

    def __len__(self) -> int:
        source = self._source
        return super().__len__() if source is None else len(source)

    def __iter__(self) -> Iterator[K]:
        source = self._source
        return super().__iter__() if source is None else source.keys()

    def keys(self) -> Any:
        """Return the keys, without making their values: a set-like view."""
        return super().keys() if self._source is None else KeysView(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[dict[K, V]], tuple[dict[K, V]]]:
        return dict, (dict(self),)

    @property
    def source(self) -> LazySource[K, V] | None:
        """The source of the dict, until an operation made all values or changed it; then None.

        Values that were looked up one by one may have been changed in place; `touched` says whether there are any.
        """
        return self._source

    @property
    def touched(self) -> bool:
        """Whether any value has been made."""
        return super().__len__() > 0

    def fill(self) -> None:
        """Make every value that is not made yet; afterwards this is an ordinary dict."""
        with self._lock:
            if self._source is None:
                return
            made = dict(super().items())
            filled = {key: made.get(key, value) for key, value in self._source.items()}
            super().clear()
            super().update(filled)
            self._source = None


def _filled_first(name: str, base: type) -> Callable[..., Any]:
    method = getattr(base, name)

    def call(self: LazyDict[Any, Any] | LazyList[Any], *args: Any, **kwargs: Any) -> Any:
        for each in (self, *args):
            if isinstance(each, LazyDict | LazyList):
                each.fill()
        return method(self, *args, **kwargs)

    call.__name__ = name
    call.__doc__ = method.__doc__
    return call


for _name in (
    *("__reversed__", "__eq__", "__ne__", "__repr__", "__or__", "__ror__", "__ior__"),
    *("__setitem__", "__delitem__", "clear", "copy", "items", "values", "pop", "popitem"),
    *("setdefault", "update"),
):
    setattr(LazyDict, _name, _filled_first(_name, dict))


class LazyListSource(Protocol[V_co]):
    """The source of a `LazyList`'s items; its contents never change.

    A source whose attribute `travels` is true is pickled in place of its items, because it is smaller; otherwise the
    items are pickled.
    """

    def __len__(self) -> int:
        """Return the number of items."""
        ...

    def __iter__(self) -> Iterator[V_co]:
        """Yield every item, in order."""
        ...


class LazyList(list[V]):
    """A list over a `LazyListSource`; the first access to an item, or change, makes all items.

    Until then `source` is the source of the items; afterwards this is an ordinary list, and `source` is None.

    Args:
        source: Source of the items.
        key: Sort key of the items when they are made; None leaves the items in the order of the source. The key is not
            pickled.
    """

    __slots__ = ("_key", "_source")

    def __init__(self, source: LazyListSource[V], *, key: Callable[[V], Any] | None = None) -> None:
        super().__init__()
        self._source: LazyListSource[V] | None = source
        self._key = key

    @property
    def source(self) -> LazyListSource[V] | None:
        """The source of the list, until its items are first accessed; then None."""
        return self._source

    def __len__(self) -> int:
        source = self._source
        return super().__len__() if source is None else len(source)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[list[V]], tuple[Any]]:
        source = self._source
        if source is not None and getattr(source, "travels", False):
            return LazyList, (source,)
        return list, ([*self],)

    def fill(self) -> None:
        """Make every item; afterwards this is an ordinary list."""
        source, self._source = self._source, None
        if source is not None:
            super().extend(source if self._key is None else sorted(source, key=self._key))

    def __radd__(self, other: list[V]) -> list[V]:
        # Otherwise `list + self` would copy the list's own memory, which is empty while no item was made.
        return [*other, *self] if isinstance(other, list) else NotImplemented


for _name in (
    *("__iter__", "__reversed__", "__contains__", "__getitem__", "__setitem__", "__delitem__", "__add__", "__iadd__"),
    *("__mul__", "__rmul__", "__imul__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__"),
    *("append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"),
):
    setattr(LazyList, _name, _filled_first(_name, list))

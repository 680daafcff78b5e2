"""Dict and list subclasses that create their elements on first access.

They behave like an ordinary dict or list. An operation that needs all values, or changes the dict, creates them all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, KeysView
from typing import Any, Protocol, TypeVar

K = TypeVar("K")
V = TypeVar("V")
K_co = TypeVar("K_co", covariant=True)
V_co = TypeVar("V_co", covariant=True)


class LazySource(Protocol[K_co, V_co]):
    """Immutable source of a `LazyDict`'s values."""

    def __len__(self) -> int: ...

    def make(self, key: object) -> V_co:
        """Create a value, or raise KeyError."""
        ...

    def has(self, key: object) -> bool:
        """Return whether a key exists."""
        ...

    def keys(self) -> Iterator[K_co]:
        """Yield the keys in order."""
        ...

    def items(self) -> Iterator[tuple[K_co, V_co]]:
        """Yield (key, new value) pairs in order."""
        ...


class LazyDict(dict[K, V]):
    """Creates each value on first look-up, then keeps it. Threads may read it concurrently."""

    __slots__ = ("_lock", "source")

    def __init__(self, source: LazySource[K, V]) -> None:
        super().__init__()
        self.source: LazySource[K, V] | None = source
        """None once all values were created or the dict changed; see `touched`."""
        self._lock = threading.RLock()

    def __missing__(self, key: K) -> V:
        with self._lock:
            if super().__contains__(key):
                return super().__getitem__(key)
            if self.source is None:
                raise KeyError(key)
            value = self.source.make(key)
            super().__setitem__(key, value)
            return value

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a value or the default."""
        try:
            return self[key]
        except KeyError:
            return default

    def __contains__(self, key: object) -> bool:
        source = self.source
        return super().__contains__(key) if source is None else source.has(key)

    def __len__(self) -> int:
        source = self.source
        return super().__len__() if source is None else len(source)

    def __iter__(self) -> Iterator[K]:
        source = self.source
        return super().__iter__() if source is None else source.keys()

    def keys(self) -> Any:
        """Return a view that creates no values."""
        return super().keys() if self.source is None else KeysView(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[dict[K, V]], tuple[dict[K, V]]]:
        return dict, (dict(self),)

    @property
    def touched(self) -> bool:
        """Whether a look-up created a value, which the caller may have changed."""
        return super().__len__() > 0

    def fill(self) -> None:
        """Become an ordinary dict."""
        with self._lock:
            if self.source is None:
                return
            made = dict(super().items())
            filled = {key: made.get(key, value) for key, value in self.source.items()}
            super().clear()
            super().update(filled)
            self.source = None


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
    """Source of a `LazyList`'s elements; pickled in their place if it has a true attribute `travels`."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[V_co]: ...


class LazyList(list[V]):
    """Creates all elements at the first access other than `len`, sorted by `key` (not pickled)."""

    __slots__ = ("_key", "source")

    def __init__(self, source: LazyListSource[V], *, key: Callable[[V], Any] | None = None) -> None:
        super().__init__()
        self.source: LazyListSource[V] | None = source
        """None once the elements exist."""
        self._key = key

    def __len__(self) -> int:
        source = self.source
        return super().__len__() if source is None else len(source)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[list[V]], tuple[Any]]:
        source = self.source
        if source is not None and getattr(source, "travels", False):
            return LazyList, (source,)
        return list, ([*self],)

    def fill(self) -> None:
        """Become an ordinary list."""
        source, self.source = self.source, None
        if source is not None:
            super().extend(source if self._key is None else sorted(source, key=self._key))

    def __radd__(self, other: list[V]) -> list[V]:
        # The default `list + self` copies the base list's memory, which is empty before `fill`.
        return [*other, *self] if isinstance(other, list) else NotImplemented


for _name in (
    *("__iter__", "__reversed__", "__contains__", "__getitem__", "__setitem__", "__delitem__", "__add__", "__iadd__"),
    *("__mul__", "__rmul__", "__imul__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__"),
    *("append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"),
):
    setattr(LazyList, _name, _filled_first(_name, list))

"""`LazyDict` and `LazyList`: subclasses of dict and list whose elements are created on first access.

They compare, copy, pickle and change like an ordinary dict or list. A look-up of one key in the dict creates only its
value; an operation that needs all values, or changes the dict, creates all values first.
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
    """Contract of the source from which a `LazyDict` creates its values; the contents of a source never change."""

    def __len__(self) -> int:
        """Return the number of keys of the dict."""
        ...

    def make(self, key: object) -> V_co:
        """Create and return the value of a key. Raises KeyError for an unknown key."""
        ...

    def has(self, key: object) -> bool:
        """Return whether the dict has this key."""
        ...

    def keys(self) -> Iterator[K_co]:
        """Yield each key once, in the order of the dict."""
        ...

    def items(self) -> Iterator[tuple[K_co, V_co]]:
        """Yield each pair (key, new value) once, in the order of the dict."""
        ...


class LazyDict(dict[K, V]):
    """A dict whose values are created from a `LazySource` on first look-up; later look-ups return the same object.

    Several threads may read it at the same time.

    Args:
        source: Source of the values.
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
        """Return the value of `key`, or `default` if the dict has no such key."""
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
        """Return a set-like view of the keys, without creating values."""
        return super().keys() if self._source is None else KeysView(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[dict[K, V]], tuple[dict[K, V]]]:
        return dict, (dict(self),)

    @property
    def source(self) -> LazySource[K, V] | None:
        """The source of the values; None once an operation has created all values or changed the dict.

        Callers may have changed values that were looked up one by one; `touched` is true if there are such values.
        """
        return self._source

    @property
    def touched(self) -> bool:
        """Whether at least one value has been created by a look-up."""
        return super().__len__() > 0

    def fill(self) -> None:
        """Create all values that do not exist yet; afterwards the object behaves as an ordinary dict."""
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
    """Contract of the source from which a `LazyList` creates its elements; the contents of a source never change.

    If the source has a true attribute `travels`, a list that is pickled contains the source instead of the elements.
    """

    def __len__(self) -> int:
        """Return the number of elements of the list."""
        ...

    def __iter__(self) -> Iterator[V_co]:
        """Create and yield each element, in order."""
        ...


class LazyList(list[V]):
    """A list whose elements are all created from a `LazyListSource` at the first access or change.

    Args:
        source: Source of the elements.
        key: Sort key by which the elements are sorted when they are created; None for the order of the source. The sort
            key is not pickled.
    """

    __slots__ = ("_key", "_source")

    def __init__(self, source: LazyListSource[V], *, key: Callable[[V], Any] | None = None) -> None:
        super().__init__()
        self._source: LazyListSource[V] | None = source
        self._key = key

    @property
    def source(self) -> LazyListSource[V] | None:
        """The source of the elements; None once the elements have been created."""
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
        """Create all elements; afterwards the object behaves as an ordinary list."""
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

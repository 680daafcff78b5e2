"""Portable keys of state dicts: replacements for keys whose classes the worker process cannot import.

The worker cannot import classes that the trainer's script defines. A checkpoint stores keys only as text, so a portable
key keeps only the texts that `str` and `repr` return for the original key.
"""

from __future__ import annotations

import functools
from typing import Any

from dcp_async.staging.skeleton import Skeleton

__all__ = ["NamedKey", "NamedText", "portable"]

_ANYWHERE = {str, int, float, complex, bool, bytes, type(None)}


class NamedText(str):  # noqa: SLOT000 - there are few, and mypy knows no slots of text
    """Portable key for a key of a `str` subclass: equals the same text, and has the original `str()` and `repr()`."""

    _name: str
    _repr: str

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return self._repr

    def __reduce__(self) -> tuple[Any, ...]:
        return _stand_in, (type(self).__qualname__, self._name, self._repr, str.__str__(self))


class NamedKey:
    """Portable key in place of a key of any other class: same `str()` and `repr()`, equal only to itself."""

    _name: str
    _repr: str

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return self._repr

    def __reduce__(self) -> tuple[Any, ...]:
        return _stand_in, (type(self).__qualname__, self._name, self._repr, None)


@functools.cache
def _class_named(name: str, base: type) -> type:
    """Make a class with the name of the original class, which warnings show."""
    return type(name, (base,), {})


def _stand_in(class_name: str, name: str, described: str, text: str | None) -> NamedText | NamedKey:
    made: Any = _class_named(class_name, NamedKey)() if text is None else _class_named(class_name, NamedText)(text)
    vars(made).update(_name=name, _repr=described)
    return made  # type: ignore[no-any-return]


def portable(skeleton: Skeleton) -> Skeleton:
    """Return a skeleton with portable keys; `skeleton` itself if all of its keys can be unpickled in any process."""
    kind = skeleton[0]
    if kind == "l":
        below = _all_portable(skeleton[1])
        return skeleton if below is skeleton[1] else (kind, below)
    if kind != "d":
        return skeleton
    _, keys, nodes, *types = skeleton
    below = _all_portable(nodes)
    if types and not all(map(_is_known_anywhere, keys)):
        keys = tuple([_portable_key(key) for key in keys])
        types = [(object,) * len(keys)]  # types distinguish keys in the trainer only
    return skeleton if below is nodes and keys is skeleton[1] else (kind, keys, below, *types)


def _all_portable(nodes: tuple[Skeleton, ...]) -> tuple[Skeleton, ...]:
    found = tuple([portable(node) for node in nodes])
    return nodes if all(one is other for one, other in zip(found, nodes, strict=True)) else found


def _is_known_anywhere(key: Any) -> bool:
    return type(key) in _ANYWHERE or (type(key) is tuple and all(map(_is_known_anywhere, key)))


def _portable_key(key: Any) -> Any:
    if _is_known_anywhere(key):
        return key
    text = str.__str__(key) if isinstance(key, str) else None
    return _stand_in(type(key).__qualname__, str(key), repr(key), text)

"""Check of an object's unfolded size, in which an element that occurs several times is counted each time.

A few bytes of a pickle can make nested lists, each of which contains the next list twice: they need little memory, but
printing, comparing or flattening them never ends.
"""

from __future__ import annotations

import argparse
import collections
import types
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from dcp_manifest.pickles.pickle_table import UnsafePickleError

__all__ = ["refuse_unfolding"]

_LEAVES = frozenset((str, int, float, bool, bytes, type(None)))
_SEQUENCES = frozenset((list, tuple, set, frozenset, collections.deque))
_MAPPINGS = frozenset((dict, collections.OrderedDict, collections.defaultdict, collections.Counter))
_NAMESPACES = frozenset((argparse.Namespace, types.SimpleNamespace))
# Ordinary values are shared up to a thousand times; a value that doubles passes this after a few dozen bytes.
_FREE = 50_000_000
_PER_BYTE = 1000


def refuse_unfolding(value: object, nbytes: int) -> None:
    """Raise if the unfolded size of a loaded object is far larger than its stored size.

    Args:
        value: Object that was loaded; no other thread may use it during the call.
        nbytes: Stored size of the object in bytes.

    Raises:
        UnsafePickleError: The unfolded size is too large.
    """
    if _parts(value):
        _count(value, _FREE + _PER_BYTE * nbytes)


def _count(value: object, most: int) -> int:
    """Count the parts of a value: shared parts once for each place in which they are, cycles once."""
    sizes: dict[int, int] = {id(value): 1}
    path: list[tuple[object, Iterator[Any], int]] = []
    owner, parts, size = value, iter(_parts(value)), 1
    while True:
        for part in parts:
            if type(part) in _LEAVES:
                size += 1
                continue
            known = sizes.get(id(part))
            below = _parts(part) if known is None else ()
            if not below:
                size += known or 1
                continue
            sizes[id(part)] = 1
            path.append((owner, parts, size))
            owner, parts, size = part, iter(below), 1
            break
        else:
            sizes[id(owner)] = size
            if size > most:
                raise UnsafePickleError("a value whose parts are shared too often to be printed is not allowed")
            if not path:
                return size
            below_size = size
            owner, parts, size = path.pop()
            size += below_size


def _parts(value: object) -> Collection[Any]:
    """Return the direct elements of a container; empty for any other value."""
    kind = type(value)
    if kind in _SEQUENCES:
        return value  # type: ignore[return-value]
    if kind in _MAPPINGS:
        return [*value.keys(), *value.values()]  # type: ignore[attr-defined]
    if kind in _NAMESPACES:
        return list(vars(value).values())
    if kind is np.ndarray and value.dtype.hasobject:  # type: ignore[attr-defined]
        return value.ravel().tolist()  # type: ignore[attr-defined, no-any-return]
    return ()

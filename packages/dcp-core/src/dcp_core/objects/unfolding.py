"""How large a value is when nothing of it is shared: what printing, comparing or flattening it would go through.

A few bytes of a pickle make a list of a list of a list …, twice each: little memory, and no end when it is printed.
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
# Values may well be shared a thousand times; doubled again and again they pass this after a few dozen bytes.
_FREE = 50_000_000
_PER_BYTE = 1000


def refuse_unfolding(value: object, nbytes: int) -> None:
    """Refuse a value that would unfold to far more than it was stored in.

    Args:
        value: What was read; must not be used by others meanwhile.
        nbytes: Of how many bytes.

    Raises:
        UnsafePickleError: It would.
    """
    if _parts(value):
        _count(value, _FREE + _PER_BYTE * nbytes)


def _count(value: object, most: int) -> int:
    """How many parts a value has, those counted again that are in several places; of a cycle one round."""
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
    """What is directly in a container; nothing for anything else."""
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

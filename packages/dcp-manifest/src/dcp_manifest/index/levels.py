"""Order by level: numbers of all first chunks of tensors, then of all second chunks, and so on.

If ranks cut tensors evenly, a rank has one level, so what a load needs lies together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dcp_manifest.index.columns import border_counts, ranges, starts
from dcp_manifest.types import I64, U32, U64

FEW_CHUNKS = 64
"""Chunks of a tensor up to which readers look at all of them."""


def level_starts(chunks: I64) -> I64:
    """Return where levels begin, and the end, for tensors in so many `chunks`."""
    fewer = np.cumsum(np.bincount(chunks))
    return starts(len(chunks) - fewer[:-1])


def level_borders(chunks: I64, stored_bytes: U64) -> I64:
    """Return the running CRCs per level, for chunks that have so many `stored_bytes`."""
    sums, at = np.zeros(int(chunks.max(initial=0)), np.int64), 0
    for count in chunks.tolist():
        sums[:count] += border_counts(stored_bytes[at : at + count])
        at += count
    return sums


def order_by_level(numbers: U32, chunks: I64, stored_bytes: U64 | None, ordered: U32) -> None:
    """Write the CRCs of chunks, or with `stored_bytes` their running CRCs, by level."""
    at = 0
    for places in _places(chunks, stored_bytes):
        ordered[places] = numbers[at : at + len(places)]
        at += len(places)


def by_tensor(ordered: U32, chunks: I64, stored_bytes: U64 | None = None) -> U32:
    """Undo `order_by_level`."""
    numbers, at = np.empty_like(ordered), 0
    for places in _places(chunks, stored_bytes):
        numbers[at : at + len(places)] = ordered[places]
        at += len(places)
    return numbers


def _places(chunks: I64, stored_bytes: U64 | None) -> Iterator[I64]:
    """Yield, tensor by tensor, the places of its numbers."""
    free = level_starts(chunks)[:-1] if stored_bytes is None else starts(level_borders(chunks, stored_bytes))[:-1]
    at = 0
    for count in chunks.tolist():
        first = free[:count].copy()
        if stored_bytes is None:
            free[:count] += 1
            yield first
        else:
            free[:count] += border_counts(stored_bytes[at : at + count])
            yield ranges(first, free[:count])
        at += count

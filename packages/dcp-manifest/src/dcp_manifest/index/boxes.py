"""Arithmetic of boxes: overlaps, bounds and holes. Integers only, no tensors.

A box is a pair of sequences: start and extent per dimension, in elements. A box of a 0-dimensional tensor has volume
1. Boxes of volume 0 overlap no box. Chunks cover a tensor exactly if none is out of bounds, no two overlap, and their
volumes add up to the volume of the tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dcp_manifest.index.box_columns import distinct

__all__ = ["Box", "BoxLike", "box_text", "find_hole", "find_overlap", "intersect", "out_of_bounds", "overlaps"]

I64 = npt.NDArray[np.int64]
BoxLike = tuple[Sequence[int], Sequence[int]]
_PAIRS_AT_ONCE = 1 << 20
_FEW = 8


class Box(NamedTuple):
    """A box of a tensor: start and extent per dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.sizes)


def box_text(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Format a box like a Python index: `[0:4, 2:3]`."""
    return f"[{', '.join(f'{start}:{start + size}' for start, size in zip(offsets, sizes, strict=True))}]"


def intersect(first: BoxLike, second: BoxLike) -> Box | None:
    """Return the intersection of two boxes, or None if they do not overlap."""
    offsets = []
    sizes = []
    for start, size, other_start, other_size in zip(*first, *second, strict=True):
        low = max(start, other_start)
        high = min(start + size, other_start + other_size)
        if high <= low:
            return None
        offsets.append(low)
        sizes.append(high - low)
    return Box(tuple(offsets), tuple(sizes))


def overlaps(box: BoxLike, chunks: Sequence[BoxLike]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Return every chunk that overlaps `box`: its position in `chunks`, and start and extent of the intersection.

    The result has the order of `chunks`. All starts are positions in the tensor to which the boxes belong.
    """
    if len(chunks) <= _FEW:
        return [(row, *shared) for row, chunk in enumerate(chunks) if (shared := intersect(box, chunk)) is not None]
    starts, ends = _arrays(chunks)
    low = np.maximum(starts, np.asarray(box[0], np.int64))
    high = np.minimum(ends, np.asarray(box[0], np.int64) + np.asarray(box[1], np.int64))
    rows = np.flatnonzero((high > low).all(axis=1))
    shared_starts, shared_sizes = low[rows].tolist(), (high - low)[rows].tolist()
    return list(zip(rows.tolist(), map(tuple, shared_starts), map(tuple, shared_sizes), strict=True))


def out_of_bounds(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a box is not inside a tensor of shape `shape`: a negative or too large number, or other dimensions."""
    if not len(offsets) == len(sizes) == len(shape):
        return True
    return any(
        start < 0 or size < 0 or start + size > extent
        for start, size, extent in zip(offsets, sizes, shape, strict=True)
    )


def find_overlap(chunks: Sequence[BoxLike]) -> tuple[int, int] | None:
    """Find two chunks that overlap; returns their positions in `chunks`, ascending, or None if no two chunks overlap.

    Sorts the chunks along the dimension with the most distinct starts, and splits the set at positions that no chunk
    crosses. Only sets that cannot be split in any dimension are compared pair by pair. Grids take O(n log n) time.
    """
    if len(chunks) <= _FEW:
        for row, chunk in enumerate(chunks):
            for other in range(row + 1, len(chunks)):
                if intersect(chunk, chunks[other]) is not None:
                    return row, other
        return None
    starts, ends = _arrays(chunks)
    rows = np.flatnonzero((ends > starts).all(axis=1))
    pair = _overlap_among(starts, ends, rows)
    return None if pair is None else (min(pair), max(pair))


def _overlap_among(starts: I64, ends: I64, rows: I64) -> tuple[int, int] | None:
    if len(rows) < 2:
        return None
    counts = [len(distinct(starts[rows, dim])) for dim in range(starts.shape[1])]
    dims = sorted(range(len(counts)), key=counts.__getitem__, reverse=True)
    for dim in dims:
        ordered = rows[np.argsort(starts[rows, dim], kind="stable")]
        reach = np.maximum.accumulate(ends[ordered, dim])
        cuts = np.flatnonzero(starts[ordered[1:], dim] >= reach[:-1]) + 1
        if len(cuts) == 0:
            continue
        borders = np.concatenate([[0], cuts, [len(ordered)]])
        for group in np.flatnonzero(np.diff(borders) > 1).tolist():
            pair = _overlap_among(starts, ends, ordered[borders[group] : borders[group + 1]])
            if pair is not None:
                return pair
        return None
    if not dims:
        return int(rows[0]), int(rows[1])
    return _overlap_by_pairs(starts, ends, rows[np.argsort(starts[rows, dims[0]], kind="stable")], dims[0])


def _overlap_by_pairs(starts: I64, ends: I64, ordered: I64, dim: int) -> tuple[int, int] | None:
    # Box i can only overlap boxes that start before it ends: positions i + 1 … last[i] of the sorted order.
    last = np.searchsorted(starts[ordered, dim], ends[ordered, dim], side="left")
    partners = last - np.arange(1, len(ordered) + 1)
    total = np.concatenate([[0], np.cumsum(partners)])
    row = 0
    while row < len(ordered):
        stop = max(row + 1, int(np.searchsorted(total, total[row] + _PAIRS_AT_ONCE, side="right")) - 1)
        counts = partners[row:stop]
        first = np.repeat(np.arange(row, stop), counts)
        second = first + 1 + np.arange(len(first)) - np.repeat(total[row:stop] - total[row], counts)
        one, two = ordered[first], ordered[second]
        meets = (np.maximum(starts[one], starts[two]) < np.minimum(ends[one], ends[two])).all(axis=1)
        hit = int(np.argmax(meets)) if len(meets) else 0
        if len(meets) and meets[hit]:
            return int(one[hit]), int(two[hit])
        row = stop
    return None


def find_hole(box: BoxLike, chunks: Sequence[BoxLike]) -> Box | None:
    """Find the first region of `box`, in row-major order, that no chunk covers; None if chunks cover the box.

    The chunks may overlap, and may reach beyond the box.
    """
    if math.prod(box[1]) == 0:
        return None
    parts = [Box(offsets, sizes) for _, offsets, sizes in overlaps(box, chunks)]
    whole = Box(tuple(box[0]), tuple(box[1]))
    if whole in parts:
        return None
    if sum(part.volume for part in parts) == whole.volume and find_overlap(parts) is None:
        return None
    starts, ends = _arrays(parts, len(whole.sizes))
    hole = _hole_from(0, list(whole.offsets), [start + size for start, size in zip(*whole, strict=True)], starts, ends)
    if hole is None:
        return None
    return Box(tuple(low for low, _ in hole), tuple(high - low for low, high in hole))


def _hole_from(dim: int, low: list[int], high: list[int], starts: I64, ends: I64) -> list[tuple[int, int]] | None:
    """Return the first region of [low, high), from dimension `dim` on, that none of the boxes covers."""
    if dim == len(low):
        return None if len(starts) else []
    if not len(starts):
        return list(zip(low[dim:], high[dim:], strict=True))
    cuts = distinct(np.concatenate([starts[:, dim], ends[:, dim], [low[dim], high[dim]]])).tolist()
    for begin, end in itertools.pairwise(cuts):
        rows = (starts[:, dim] <= begin) & (ends[:, dim] >= end)
        below = _hole_from(dim + 1, low, high, starts[rows], ends[rows])
        if below is not None:
            return [(begin, end), *below]
    return None


def _arrays(boxes: Sequence[BoxLike], ndim: int | None = None) -> tuple[I64, I64]:
    width = len(boxes[0][0]) if ndim is None else ndim
    starts: I64 = np.array([tuple(box[0]) for box in boxes], np.int64).reshape(len(boxes), width)
    sizes: I64 = np.array([tuple(box[1]) for box in boxes], np.int64).reshape(len(boxes), width)
    return starts, starts + sizes

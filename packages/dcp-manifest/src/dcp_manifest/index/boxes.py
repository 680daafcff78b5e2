"""Arithmetic of boxes: overlaps, bounds and holes. No tensors.

A 0-dimensional box has volume 1. Boxes of volume 0 overlap no box. Chunks cover a tensor exactly if none is out of
bounds, no two overlap, and their volumes add up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dcp_manifest.index.columns import CheckpointIndex, distinct, starts
from dcp_manifest.types import I64

BoxLike = tuple[Sequence[int], Sequence[int]]
_PAIRS_AT_ONCE = 1 << 20
_FEW = 8


class Box(NamedTuple):
    """Start and extent per dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def box_text(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Format a box like an index: `[0:4, 2:3]`."""
    return f"[{', '.join(f'{start}:{start + size}' for start, size in zip(offsets, sizes, strict=True))}]"


def intersect(first: BoxLike, second: BoxLike) -> Box | None:
    """Return the intersection; None without overlap."""
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
    """Return the chunks that overlap `box`: position in `chunks`, start in the tensor, extent of the intersection."""
    if len(chunks) <= _FEW:
        return [(row, *shared) for row, chunk in enumerate(chunks) if (shared := intersect(box, chunk)) is not None]
    starts, ends = _arrays(chunks)
    low = np.maximum(starts, np.asarray(box[0], np.int64))
    high = np.minimum(ends, np.asarray(box[0], np.int64) + np.asarray(box[1], np.int64))
    rows = np.flatnonzero((high > low).all(axis=1))
    shared_starts, shared_sizes = low[rows].tolist(), (high - low)[rows].tolist()
    return list(zip(rows.tolist(), map(tuple, shared_starts), map(tuple, shared_sizes), strict=True))


def out_of_bounds(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a box is not inside a tensor, or has other dimensions."""
    if not len(offsets) == len(sizes) == len(shape):
        return True
    return any(
        start < 0 or size < 0 or start + size > extent
        for start, size, extent in zip(offsets, sizes, shape, strict=True)
    )


def find_overlap(chunks: Sequence[BoxLike]) -> tuple[int, int] | None:
    """Return the positions of two chunks that overlap, ascending. Grids take O(n log n) time."""
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
    """Return the first region of `box`, in row-major order, that no chunk covers.

    Chunks may overlap, and may reach beyond the box.
    """
    if math.prod(box[1]) == 0:
        return None
    parts = [Box(offsets, sizes) for _, offsets, sizes in overlaps(box, chunks)]
    whole = Box(tuple(box[0]), tuple(box[1]))
    if whole in parts:
        return None
    if sum([math.prod(part.sizes) for part in parts]) == math.prod(whole.sizes) and find_overlap(parts) is None:
        return None
    starts, ends = _arrays(parts, len(whole.sizes))
    hole = _hole_from(0, list(whole.offsets), [start + size for start, size in zip(*whole, strict=True)], starts, ends)
    if hole is None:
        return None
    return Box(tuple(low for low, _ in hole), tuple(high - low for low, high in hole))


def _hole_from(dim: int, low: list[int], high: list[int], starts: I64, ends: I64) -> list[tuple[int, int]] | None:
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


@dataclass(frozen=True, slots=True)
class SameDims:
    """Chunks with one number of dimensions, in table order."""

    rows: I64
    tensor: I64
    """Rows of their tensors, ascending."""
    offsets: I64
    """In elements; an array of (chunks, dimensions)."""
    sizes: I64
    shapes: I64
    """Shapes of their tensors; an array of (chunks, dimensions)."""


def by_dims(index: CheckpointIndex) -> Iterator[SameDims]:
    """Group the chunks by number of dimensions."""
    tensor = np.repeat(np.arange(len(index.tensor_chunks)), index.tensor_chunks)
    ndim = index.tensor_ndim[tensor]
    first, shape_first = starts(ndim)[:-1], index.shape_starts()[:-1]
    for dims in distinct(ndim).tolist():
        rows = np.flatnonzero(ndim == dims)
        numbers = first[rows][:, None] + np.arange(dims)
        shapes = index.tensor_shape[shape_first[tensor[rows]][:, None] + np.arange(dims)]
        yield SameDims(rows, tensor[rows], index.chunk_offsets[numbers], index.chunk_sizes[numbers], shapes)


def is_proper(index: CheckpointIndex, *, complete: bool) -> bool:
    """Whether each tensor's chunks are inside it without overlaps and, if `complete`, without holes."""
    if not (index.tensor_chunks > 0).all():
        return False
    for chunks in by_dims(index):
        offsets, sizes, shapes = chunks.offsets, chunks.sizes, chunks.shapes
        if (offsets < 0).any() or (sizes < 0).any() or (offsets + sizes > shapes).any():
            return False
        volumes = sizes.prod(axis=1)
        groups = _group_starts(chunks.tensor)
        if complete and not np.array_equal(np.add.reduceat(volumes, groups), shapes[groups].prod(axis=1)):
            return False
        filled = np.flatnonzero(volumes > 0)
        if len(filled) and not _are_apart(chunks.tensor[filled], offsets[filled], sizes[filled]):
            return False
    return True


def coverage_problems(index: CheckpointIndex) -> list[tuple[str, str]]:
    """Return (name, problem as a sentence) for the tensors that their chunks do not cover exactly."""
    if is_proper(index, complete=True):
        return []
    found: list[tuple[str, str]] = []
    chunk_starts, box_starts, shape_starts = index.chunk_starts(), index.box_starts(), index.shape_starts()
    for row, name in enumerate(index.tensor_names):
        ndim, count = int(index.tensor_ndim[row]), int(chunk_starts[row + 1] - chunk_starts[row])
        numbers = slice(int(box_starts[row]), int(box_starts[row + 1]))
        offsets, sizes = (box[numbers].reshape(count, ndim) for box in (index.chunk_offsets, index.chunk_sizes))
        shape = tuple(index.tensor_shape[shape_starts[row] : shape_starts[row + 1]].tolist())
        problem = _problem(offsets, sizes, shape)
        if problem is not None:
            found.append((name, problem))
    return found


def _problem(offsets: I64, sizes: I64, shape: tuple[int, ...]) -> str | None:
    boxes = [(tuple(offset), tuple(size)) for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
    pair = find_overlap(boxes)
    if pair is not None:
        one, two = (f"{offset}+{size}" for offset, size in (boxes[position] for position in pair))
        return f"the chunks {one} and {two} (offsets+sizes) store the same elements"
    stored, wanted = sum(math.prod(size) for _, size in boxes), math.prod(shape)
    return None if stored == wanted else f"chunks hold {stored} of the {wanted} elements of shape {shape}"


def _group_starts(tensor: I64) -> I64:
    return np.flatnonzero(np.concatenate([[True], tensor[1:] != tensor[:-1]]))


def _are_apart(tensor: I64, offsets: I64, sizes: I64) -> bool:
    groups = _group_starts(tensor)
    counts = np.diff(np.concatenate([groups, [len(tensor)]]))
    cut = np.maximum.reduceat(offsets, groups, axis=0) != np.minimum.reduceat(offsets, groups, axis=0)
    cuts = cut.sum(axis=1)
    if ((cuts == 0) & (counts > 1)).any():
        return False
    along_one = np.repeat(cuts == 1, counts)
    if along_one.any():
        dim = np.repeat(cut.argmax(axis=1) if cut.shape[1] else np.zeros(len(groups), np.int64), counts)[along_one]
        rows = np.flatnonzero(along_one)
        begin, end, owner = offsets[rows, dim], offsets[rows, dim] + sizes[rows, dim], tensor[rows]
        order = np.lexsort((begin, owner))
        begin, end, owner = begin[order], end[order], owner[order]
        if ((owner[1:] == owner[:-1]) & (begin[1:] < end[:-1])).any():
            return False
    along_more = np.flatnonzero(np.repeat(cuts > 1, counts))
    if not len(along_more):
        return True
    for group in _not_in_grids(tensor[along_more], offsets[along_more], sizes[along_more]):
        rows = np.flatnonzero(tensor == group)
        if find_overlap(list(zip(offsets[rows].tolist(), sizes[rows].tolist(), strict=True))) is not None:
            return False
    return True


def _not_in_grids(tensor: I64, offsets: I64, sizes: I64) -> list[int]:
    """Return the tensors with chunks that may not form a grid.

    In a grid, no two boxes overlap in a dimension with different starts, or have all starts equal.
    """
    doubtful = [np.zeros(0, np.int64)]
    order = np.lexsort((*offsets.T, tensor))
    alike = (tensor[order][1:] == tensor[order][:-1]) & (offsets[order][1:] == offsets[order][:-1]).all(axis=1)
    doubtful.append(tensor[order][1:][alike])
    for begin, size in zip(offsets.T, sizes.T, strict=True):
        order = np.lexsort((begin, tensor))
        owner, first, end = tensor[order], begin[order], (begin + size)[order]
        groups = np.flatnonzero(np.concatenate([[True], (owner[1:] != owner[:-1]) | (first[1:] != first[:-1])]))
        last = np.maximum.reduceat(end, groups)
        clash = (owner[groups][1:] == owner[groups][:-1]) & (last[:-1] > first[groups][1:])
        doubtful.append(owner[groups][1:][clash])
    found: list[int] = distinct(np.concatenate(doubtful)).tolist()
    return found

"""Boxes of a DTensor at one position of its device mesh, computed from shape, mesh shape and placements.

This module computes only with integers; `shards` gets these from DTensors.

Source: torch 2.13 `torch.distributed.tensor.placement_types` (`Shard._custom_chunk`, `_StridedShard._split_tensor`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

__all__ = ["LocalBox", "ShardedDim", "local_boxes"]

Intervals = list[tuple[int, int]]


class ShardedDim(NamedTuple):
    """Placement of a mesh dimension that shards the tensor dimension `dim`.

    `split_factor` is the split factor of a `_StridedShard`, or 1 for a `Shard`.
    """

    dim: int
    split_factor: int = 1


class LocalBox(NamedTuple):
    """A box of the global tensor that a rank holds: offsets in the global and the local tensor, and sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


@lru_cache(maxsize=4096)
def local_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[ShardedDim | None, ...],
) -> tuple[tuple[int, ...], tuple[LocalBox, ...]]:
    """Return the local shape and the boxes of a sharded tensor at one position of a device mesh.

    Args:
        shape: Global shape of the tensor.
        mesh_shape: Size of each mesh dimension.
        coordinate: Position in each mesh dimension.
        placements: How each mesh dimension shards the tensor; None for a mesh dimension that replicates.

    Returns:
        Shape of the local tensor, and the boxes of the global tensor that it consists of, in row-major order: usually
        one, several if the local rows are not contiguous in the global tensor, none if the local tensor is empty.
    """
    intervals: list[Intervals] = [[(0, extent)] if extent else [] for extent in shape]
    for size, position, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement is not None:
            intervals[placement.dim] = _part(intervals[placement.dim], size, position, placement.split_factor)
    local_shape = tuple(sum(length for _, length in runs) for runs in intervals)
    boxes = tuple(
        LocalBox(
            tuple(start for start, _, _ in runs),
            tuple(length for _, length, _ in runs),
            tuple(local for _, _, local in runs),
        )
        for runs in itertools.product(*map(_with_local_starts, intervals))
    )
    return local_shape, boxes


def _part(runs: Intervals, parts: int, position: int, split_factor: int) -> Intervals:
    """Return share `position` of `parts` of the rows in `runs`: first cut into `split_factor` pieces, then each one."""
    total = sum(length for _, length in runs)
    taken: Intervals = []
    for piece in range(split_factor):
        start, stop = _chunk(total, split_factor, piece)
        begin, end = _chunk(stop - start, parts, position)
        taken.extend(_slice(runs, start + begin, start + end))
    return _merged(taken)


def _chunk(extent: int, parts: int, position: int) -> tuple[int, int]:
    """Return a chunk as `torch.chunk` does: all of equal length rounded up, the last ones shorter or empty."""
    length = -(-extent // parts)
    return min(extent, length * position), min(extent, length * (position + 1))


def _slice(runs: Intervals, start: int, stop: int) -> Intervals:
    """Return rows `start` to `stop`, counted along the runs."""
    found: Intervals = []
    at = 0
    for begin, length in runs:
        low, high = max(start, at), min(stop, at + length)
        if high > low:
            found.append((begin + low - at, high - low))
        at += length
    return found


def _merged(runs: Intervals) -> Intervals:
    merged: Intervals = []
    for begin, length in runs:
        if merged and sum(merged[-1]) == begin:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((begin, length))
    return merged


def _with_local_starts(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    ends = itertools.accumulate((length for _, length in runs), initial=0)
    return [(begin, length, local) for (begin, length), local in zip(runs, ends, strict=False)]

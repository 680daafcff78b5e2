"""Load balancing of replicated items: assigns each to the rank with the fewest bytes to write, the largest item first.

Large items are cut into parts if that levels the load. This module computes only with bytes and ranks, and its result
is deterministic.

Source: torch 2.13 `_dedup_save_plans.dedup_save_plans` (contract; stock weighs a shard by its global tensor, and cuts
nothing). Division of items between ranks: R. McNaughton, "Scheduling with deadlines and loss functions", 1959.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Assignment", "Candidates", "Part", "assign", "cut_dim"]

I64 = npt.NDArray[np.int64]

# No part of a cut candidate is smaller: describing it would cost more than it levels.
MIN_PART_BYTES = 1 << 20
# How far above the level, as a fraction of it, a rank may get before a candidate is cut instead.
_SLACK = 1 / 128


@dataclass(frozen=True, slots=True)
class Candidates:
    """Items to assign to ranks, as columns with one row per item: sizes, and the ranks that hold each item."""

    nbytes: I64
    """Size of each item in bytes; at least 1."""
    slices: I64
    """Number of equal slices of each item, between which the item may be cut; 1 if it must not be cut."""
    first: I64
    """Start of each item's ranks in `ranks`, and the length of `ranks` as the last element."""
    ranks: I64
    """Ranks that hold the items, item by item: for each item at least one rank, ascending, without repetition."""
    settled: npt.NDArray[np.bool_]
    """Whether an item must be assigned to the lowest rank that holds it."""


@dataclass(frozen=True, slots=True)
class Part:
    """The slices of a cut item that one rank writes: from number `begin`, inclusive, to `end`, exclusive."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """Result of balancing: the rank that writes each item, and the parts of each cut item.

    Attributes:
        writer: Rank that writes each item; -1 for items that are cut.
        parts: Row of a cut item in `Candidates` → its parts, which together are the whole item.
    """

    writer: I64
    parts: dict[int, list[Part]] = field(default_factory=dict)


def cut_dim(sizes: Sequence[int]) -> int | None:
    """Return the first dimension with a size above 1, along which a box is cut into parts; None if there is none."""
    return next((dim for dim, size in enumerate(sizes) if size > 1), None)


def assign(things: Candidates, world_size: int) -> Assignment:
    """Assign each item to one rank, or its parts to several ranks, so that ranks write about the same number of bytes.

    A rank's load is the number of bytes that it writes. Among ranks that hold the same items, no rank's load exceeds
    the average by more than 1/128 or `MIN_PART_BYTES`, as far as items may be cut. Of ranks with equal loads the lowest
    is chosen.

    Args:
        things: Items to assign.
        world_size: Number of ranks.
    """
    holders = np.diff(things.first)
    settled = things.settled | (holders == 1)
    writer = np.where(settled, things.ranks[things.first[:-1]] if len(holders) else 0, -1).astype(np.int64)
    loads = np.zeros(world_size, np.int64)
    np.add.at(loads, writer[settled], things.nbytes[settled])
    groups: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(~settled).tolist():
        held_by = things.ranks[things.first[row] : things.first[row + 1]]
        groups.setdefault(held_by.tobytes(), []).append(row)
    parts: dict[int, list[Part]] = {}
    # Small sets of ranks first: later, their few ranks would already be filled by candidates with more choice.
    for key, rows in sorted(groups.items(), key=lambda pair: (len(pair[0]), pair[1][0])):
        _fill(things, rows, np.frombuffer(key, np.int64), loads, writer, parts)
    return Assignment(writer, parts)


def _fill(
    things: Candidates,
    rows: list[int],
    holders: npt.NDArray[Any],
    loads: I64,
    writer: I64,
    parts: dict[int, list[Part]],
) -> None:
    """Assign candidates that the same ranks hold; adds to `loads`, `writer` and `parts`."""
    level = _level(loads[holders], int(things.nbytes[rows].sum()))
    limit = level + max(MIN_PART_BYTES, level * _SLACK)
    heap = [(int(loads[rank]), rank) for rank in holders.tolist()]
    heapq.heapify(heap)
    sizes, slices = things.nbytes[rows].tolist(), things.slices[rows].tolist()
    for size, row, count in sorted(zip(sizes, rows, slices, strict=True), key=lambda each: (-each[0], each[1])):
        load, rank = heap[0]
        if load + size <= limit or count == 1 or size < 2 * MIN_PART_BYTES:
            heapq.heapreplace(heap, (load + size, rank))
            writer[row] = rank
        else:
            cut = _cut(heap, level, size // count, count)
            if len(cut) > 1:
                parts[row] = cut
            else:
                writer[row] = cut[0].rank
    for load, rank in heap:
        loads[rank] = load


def _cut(heap: list[tuple[int, int]], level: float, slice_bytes: int, slices: int) -> list[Part]:
    """Cut one candidate into parts that fill one rank after another up to the level."""
    least = -(-MIN_PART_BYTES // slice_bytes)
    found: list[Part] = []
    filled: list[tuple[int, int]] = []
    begin = 0
    while begin < slices:
        load, rank = heapq.heappop(heap)
        end = min(slices, begin + max(least, round((level - load) / slice_bytes)))
        if slices - end < least or not heap:
            end = slices
        found.append(Part(rank, begin, end))
        filled.append((load + (end - begin) * slice_bytes, rank))
        begin = end
    for entry in filled:
        heapq.heappush(heap, entry)
    return found


def _level(loads: I64, nbytes: int) -> float:
    """Return the load that the least loaded ranks reach when `nbytes` are spread over them."""
    ordered = np.sort(loads).tolist()
    poured = nbytes
    for count, load in enumerate(ordered, 1):
        poured += load
        if count == len(ordered) or poured <= ordered[count] * count:
            return float(poured / count)
    return 0.0

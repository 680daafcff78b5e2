"""Sets of ranks that want the same bytes, numbered; the ranks of each set are listed once."""

from __future__ import annotations

import numpy as np

from dcp_exchange.assignment.columns import Numbers, Positions, expand
from dcp_exchange.assignment.rows import Rows
from dcp_exchange.assignment.stretches import CHUNK, Hashes, Stretches, mixed

__all__ = ["list_readers", "number_sets"]


SLOT_BITS = 20


def number_sets(rows: Rows, stretches: Stretches, chosen: Numbers) -> tuple[Numbers, Positions]:
    """Number the sets of ranks (classes) that want the chosen stretches, in the order of first occurrence.

    Returns:
        int32[number of chosen stretches], class of each; and int64[number of classes], position in `chosen` of the
        first stretch of each.
    """
    firsts, seconds = (stretches.totals(_set_hashes(rows, seed), chosen) for seed in (1, 2))
    same_as = np.empty(len(chosen), np.int32)  # first stretch of the same class
    left = np.arange(len(chosen), dtype=np.int32)
    turn = 0
    while len(left):
        left = _match(firsts, seconds, left, same_as, turn * (SLOT_BITS + 1) % (64 - SLOT_BITS))
        turn += 1
    begins = same_as == np.arange(len(chosen), dtype=np.int32)
    numbers = np.cumsum(begins, dtype=np.int32) - np.int32(1)
    return numbers[same_as], np.flatnonzero(begins)


def _match(firsts: Hashes, seconds: Hashes, left: Numbers, same_as: Numbers, shift: int) -> Numbers:
    """Find the first stretch of the same class by a hash table, whose slots are numbered by some bits.

    The first stretch in a slot represents its class.

    Returns:
        Stretches whose slot another class has; at least one fewer than `left`.
    """
    table = np.full(1 << SLOT_BITS, -1, np.int32)
    others = []
    for begin in range(0, len(left), CHUNK):
        part = left[begin : begin + CHUNK]
        first = firsts[part]
        slots = (first >> np.uint64(shift)) & np.uint64((1 << SLOT_BITS) - 1)
        free = table[slots] < 0
        table[slots[free][::-1]] = part[free][::-1]  # of several assignments to a slot the last one counts
        found = table[slots]
        same = (firsts[found] == first) & (seconds[found] == seconds[part])
        same_as[part[same]] = found[same]
        others.append(part[~same])
    return np.concatenate(others)


def _set_hashes(rows: Rows, seed: int) -> Hashes:
    sums = [mixed(ranks.astype(np.uint64), seed).sum(dtype=np.uint64) for ranks in rows.ranks]
    return np.array(sums, np.uint64)


def list_readers(rows: Rows, positions: Positions) -> tuple[Positions, Numbers]:
    """List the ranks that want the byte at each position of the line.

    Args:
        rows: Rows of all ranks; no byte is in two rows of a group.
        positions: Ascending positions.

    Returns:
        Borders, int64[number of positions + 1], and ranks, int32: those of position p are `ranks[borders[p] :
        borders[p + 1]]`, ascending.
    """
    low = np.searchsorted(positions, rows.starts, "left").astype(np.int32)
    high = np.searchsorted(positions, rows.stops, "left").astype(np.int32)
    hits = np.flatnonzero(high > low)
    groups, low, high = rows.groups[hits], low[hits], high[hits]
    sizes = rows.group_sizes
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    places = expand(low, high - low)
    groups = np.repeat(groups, high - low)
    members = expand(offsets[groups], sizes[groups])
    world = np.concatenate([np.zeros(0, np.int32), *rows.ranks])
    span = np.int64(world.max(initial=0)) + 1
    keys = np.repeat(places, sizes[groups]) * span + world[members]
    keys.sort()
    borders = np.searchsorted(keys, np.arange(len(positions) + 1) * span)
    return borders, (keys % span).astype(np.int32)

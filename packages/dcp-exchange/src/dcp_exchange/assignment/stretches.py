"""Stretches of the line that the same ranks want: a sweep over the sorted ends of all rows.

A set of ranks is represented by the sum of one random 128-bit number per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_exchange.assignment.rows import Numbers, Positions, Rows

Hashes = npt.NDArray[np.uint64]

CHUNK = 1 << 18
"""Numbers per step: they stay in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Ranges between neighbouring ends of rows that some rank wants; as columns, ascending.

    Attributes:
        starts: int64[n].
        stops: int64[n], exclusive.
        counts: int32[n], number of ranks that want the stretch.
        steps: Group of the row that begins, or group + number of groups of the row that ends, at the sorted ends.
        behind: int32[n], position in `steps` of the last end at the stretch's start.
    """

    starts: Positions
    stops: Positions
    counts: Numbers
    steps: npt.NDArray[Any]
    behind: Numbers

    def totals(self, per_group: npt.NDArray[Any], chosen: Positions | Numbers) -> npt.NDArray[Any]:
        """Return per chosen stretch the sum of `per_group` (which may wrap) over the groups that want it."""
        return _running(self.steps, per_group, self.behind[chosen])


def sweep(rows: Rows) -> Stretches:
    """Return the stretches of the line."""
    # Sorting numbers that hold position and group takes half the time of sorting positions for an order.
    bits = (2 * len(rows.ranks)).bit_length()
    keys = np.concatenate((rows.starts, rows.stops))
    table = None
    if keys.max(initial=0) >> (62 - bits):
        table, keys = np.unique(keys, return_inverse=True)
        keys = keys.reshape(-1)
    keys <<= bits
    count = len(rows.starts)
    keys[:count] |= rows.groups
    keys[count:] |= rows.groups + len(rows.ranks)
    keys.sort()
    steps = np.empty(len(keys), np.min_scalar_type(2 * len(rows.ranks)))
    np.bitwise_and(keys, (1 << bits) - 1, out=steps, casting="unsafe")
    keys >>= bits
    last = np.append(keys[1:] != keys[:-1], True)[: len(keys)]
    ends = keys[last] if table is None else table[keys[last]]
    del keys
    behind = np.flatnonzero(last).astype(np.int32)
    counts = _running(steps, rows.group_sizes.astype(np.int32), behind)[:-1]
    wanted = counts > 0
    return Stretches(ends[:-1][wanted], ends[1:][wanted], counts[wanted], steps, behind[:-1][wanted])


def _running(steps: npt.NDArray[Any], per_group: npt.NDArray[Any], places: Numbers) -> npt.NDArray[Any]:
    found = np.empty(len(places), per_group.dtype)
    change = np.concatenate((per_group, -per_group))
    borders = np.searchsorted(places, np.arange(0, len(steps) + CHUNK, CHUNK))
    before = np.zeros(1, per_group.dtype)
    for part, (low, high) in enumerate(pairwise(borders.tolist())):
        if low == len(places):
            break
        running = change[steps[part * CHUNK : (part + 1) * CHUNK]]
        running[:1] += before
        np.cumsum(running, out=running)
        found[low:high] = running[places[low:high] - part * CHUNK]
        before = running[-1:]
    return found


def mixed(numbers: Hashes, seed: int) -> Hashes:
    """Return 64-bit hashes, the same on every machine.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    bits: Hashes = (numbers + np.uint64(1 + (seed << 40))) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits

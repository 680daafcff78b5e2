"""Pieces: stretches of the line in sizes that suit reading and sending."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_exchange.assignment.rows import Numbers, Positions, Rows, expand
from dcp_exchange.assignment.stretches import mixed


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Ranges of the line, ascending, each wanted by one set of ranks; as columns.

    Attributes:
        starts: int64[n].
        stops: int64[n], exclusive.
        classes: int32[n], set of ranks.
        follows: bool[n], whether no rank wants bytes between this piece and the one before.
    """

    starts: Positions
    stops: Positions
    classes: Numbers
    follows: npt.NDArray[np.bool_]

    def select(self, chosen: npt.NDArray[Any]) -> Pieces:
        """Return the pieces that a mask or positions choose."""
        return Pieces(self.starts[chosen], self.stops[chosen], self.classes[chosen], self.follows[chosen])


def cut_pieces(pieces: Pieces, rows: Rows, piece_bytes: int) -> Pieces:
    """Cut longer pieces into about equal parts of at most `piece_bytes` or one grain, if rows allow it."""
    long = np.flatnonzero(pieces.stops - pieces.starts > piece_bytes)
    if len(long) == 0:
        return pieces
    starts, stops = pieces.starts[long], pieces.stops[long]
    grains, phases = _common_grids(rows, starts, stops)
    cuttable = grains > 0
    long, starts, stops, grains, phases = (each[cuttable] for each in (long, starts, stops, grains, phases))
    first_cuts = starts - (starts - phases) % grains  # on the grid, at or before the start
    most = np.maximum(piece_bytes // grains, 1) * grains
    parts = -(-(stops - first_cuts) // most)
    even = -(-(stops - first_cuts) // (parts * grains)) * grains
    origins, steps, counts = pieces.starts.copy(), np.zeros_like(pieces.starts), np.ones_like(pieces.starts)
    origins[long], steps[long], counts[long] = first_cuts, even, -(-(stops - first_cuts) // even)
    source = np.repeat(np.arange(len(counts)), counts)
    part = expand(np.zeros_like(counts), counts)
    cuts = np.maximum(pieces.starts[source], origins[source] + part * steps[source])
    is_last = np.append(part[1:] == 0, True)
    ends = np.append(cuts[1:], 0)
    ends[is_last] = pieces.stops
    return Pieces(cuts, ends, pieces.classes[source], pieces.follows[source] | (part > 0))


def _common_grids(rows: Rows, starts: Positions, stops: Positions) -> tuple[Positions, Positions]:
    """Return grain (0 for none) and phase of the grid that all rows over each range share."""
    low = np.searchsorted(starts, rows.starts, "left")
    high = np.searchsorted(stops, rows.stops, "right")
    over = np.flatnonzero(high > low)
    low, high = low[over], high[over]
    grains = rows.grains()[over]
    phases = rows.origins[over] % np.maximum(grains, 1)

    def total(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        steps = np.zeros(len(starts) + 1, values.dtype)
        np.add.at(steps, low, values)
        np.add.at(steps, high, -values)
        return np.cumsum(steps)[:-1]

    count = total(np.ones(len(over), np.int64))
    # If all are equal, each is the mean; whether they are, a sum of random numbers made of them shows.
    grain, phase = total(grains) // count, total(phases) // count
    shared = total(_grid_hashes(grains, phases)) == count.astype(np.uint64) * _grid_hashes(grain, phase)
    return np.where(shared, grain, 0), phase


def _grid_hashes(grains: Positions, phases: Positions) -> npt.NDArray[np.uint64]:
    return mixed(mixed(grains.astype(np.uint64), 3) ^ phases.astype(np.uint64), 4)


def join_pieces(pieces: Pieces, *, piece_bytes: int, gap_bytes: int) -> Pieces:
    """Join neighbours of at most half of `piece_bytes` that the same ranks want, with gaps of at most `gap_bytes`."""
    if len(pieces.starts) < 2:
        return pieces
    half = piece_bytes // 2
    short = pieces.stops - pieces.starts <= half
    linked = pieces.follows[1:] & short[1:] & short[:-1] & (pieces.classes[1:] == pieces.classes[:-1])
    linked &= pieces.starts[1:] - pieces.stops[:-1] <= gap_bytes
    begins = np.append(True, ~linked)
    cells = np.where(begins, pieces.starts, -1)
    np.maximum.accumulate(cells, out=cells)
    np.subtract(pieces.starts, cells, out=cells)
    cells //= max(half, 1)
    heads = begins
    heads[1:] |= cells[1:] != cells[:-1]
    joined = pieces.select(heads)
    tails = np.append(heads[1:], True)
    return Pieces(joined.starts, pieces.stops[tails], joined.classes, joined.follows)

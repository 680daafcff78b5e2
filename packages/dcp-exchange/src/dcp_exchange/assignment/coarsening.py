"""Coarsening of rows: fewer borders between them, so that rows are not cut where they must not be or too finely.

A rank whose rows are widened by this gets some bytes that it does not want. No byte is read more than once for it.
"""

from __future__ import annotations

import numpy as np

from dcp_exchange.assignment.rows import Rows
from dcp_exchange.assignment.stretches import Stretches

__all__ = ["coarsen", "keep_whole"]

SMALLEST_CELL_BYTES = 1 << 20


def keep_whole(rows: Rows) -> Rows:
    """Return rows without borders inside those that must not be cut: a rank that wants a part of one gets all of it."""
    uncut = rows.grains() == 0
    if not uncut.any():
        return rows
    borders = np.unique(np.concatenate((rows.starts, rows.stops)))
    first = np.searchsorted(borders, rows.starts[uncut], "right")
    behind = np.searchsorted(borders, rows.stops[uncut], "left")
    inside = np.zeros(len(borders) + 1, np.int64)
    np.add.at(inside, first, 1)
    np.add.at(inside, behind, -1)
    allowed = np.cumsum(inside)[:-1] == 0
    return rows if allowed.all() else rows.snapped(borders[allowed])


def coarsen(rows: Rows, stretches: Stretches, *, gap_bytes: int, most_readers: int) -> Rows:
    """Return rows whose ends are at the borders of equal cells of the line, large enough to bound the listed readers.

    Args:
        rows: Rows of all ranks.
        stretches: Their stretches.
        gap_bytes: Largest gap between stretches that a row may be widened over.
        most_readers: Limit of the sum, over all cells, of the number of ranks that want bytes of the cell.
    """
    sizes = rows.group_sizes[rows.groups]
    # A row has at least as many cells as fit into it.
    least = int((sizes * (rows.stops - rows.starts)).sum()) // most_readers
    shift = max(SMALLEST_CELL_BYTES.bit_length(), least.bit_length()) - 1
    while shift < 62 and (sizes * (((rows.stops - 1) >> shift) - (rows.starts >> shift) + 1)).sum() > most_readers:
        shift += 1
    apart = np.flatnonzero(stretches.starts[1:] - stretches.stops[:-1] > gap_bytes) + 1
    heads = np.append(True, stretches.starts[1:] >> shift != stretches.starts[:-1] >> shift)
    heads[apart] = True
    ends = np.append(stretches.stops[apart - 1], stretches.stops[-1])
    return rows.snapped(np.unique(np.concatenate((stretches.starts[heads], ends))))

"""`assign`: from what each rank wants to who reads what."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_exchange.assignment.assignment import Assignment
from dcp_exchange.assignment.coarsening import coarsen, keep_whole
from dcp_exchange.assignment.columns import Numbers, Positions
from dcp_exchange.assignment.kinds import Places, kinds_of, places_of
from dcp_exchange.assignment.owners import choose_owners
from dcp_exchange.assignment.pieces import Pieces, cut_pieces, join_pieces
from dcp_exchange.assignment.reader_sets import list_readers, number_sets
from dcp_exchange.assignment.rows import Group, Rows, line_up
from dcp_exchange.assignment.stretches import Stretches, sweep

__all__ = ["assign"]

# Pieces: small enough that several are under way at a time, large enough that a request is not the larger cost.
PIECES_PER_RANK = 8
SMALLEST_PIECE_BYTES = 1 << 20
LARGEST_PIECE_BYTES = 32 << 20
GAP_BYTES = 16 << 10
MOST_PIECES = 1 << 22
# Of all classes together: 4 bytes each in the result, and about 50 while they are listed.
MOST_READERS = 1 << 22


def assign(
    groups: Sequence[Group],
    hosts: Sequence[int],
    *,
    holders: Mapping[str, Collection[int]] | None = None,
    gap_bytes: int = GAP_BYTES,
    largest_piece_bytes: int = LARGEST_PIECE_BYTES,
) -> Assignment:
    """Decide which rank reads which bytes, so that each byte that several ranks want is read once.

    The result depends on what the ranks want and on nothing else: not on the order of the groups, nor on the machine.
    Time and memory grow with the number of rows, not with the number of ranks that want each.

    Args:
        groups: What the ranks want: demands, each with the ranks that have exactly these. A rank in no group wants
            nothing, but may read for others.
        hosts: Host of each rank, as any number.
        holders: Name of each object → hosts that have it; None if every rank can read all objects.
        gap_bytes: Largest gap between two wanted ranges that is read rather than skipped.
        largest_piece_bytes: Limit of the size of a piece, unless it must not be cut.

    Returns:
        The pieces that several ranks want, or that the only rank that wants them cannot read, with their owners. An
        owner can read the piece, and wants it if that keeps the ranks level: all that can read get about the same
        number of bytes, with those counted that they alone want.

    Raises:
        ValueError: A rank is in two groups or none of the job's, or no host has an object.
    """
    rows = keep_whole(line_up(groups, len(hosts), gap_bytes))
    places = places_of(rows.names, hosts, holders)
    found = _separate(rows, places)
    if found.reader_count > MOST_READERS or len(found.shared) > MOST_PIECES:
        rows = coarsen(rows, found.stretches, gap_bytes=gap_bytes, most_readers=MOST_READERS)
        del found
        found = _separate(rows, places)
    borders, readers = list_readers(rows, found.stretches.starts[found.examples])
    own_bytes, pieces = found.own_bytes, _make_pieces(rows, found, gap_bytes, largest_piece_bytes)
    del found
    objects = rows.objects_at(pieces.starts)
    sizes = pieces.stops - pieces.starts
    kinds = kinds_of(pieces.classes, sizes, places.sets[objects], borders, readers, places)
    return Assignment(
        rows.names,
        objects.astype(np.int32),
        pieces.starts - rows.bases[objects],
        pieces.stops - rows.bases[objects],
        choose_owners(kinds, sizes, own_bytes).astype(np.int32),
        pieces.classes,
        borders,
        readers,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Separated:
    """What each rank reads for itself alone, and what is read for others."""

    stretches: Stretches
    own_bytes: Positions
    """int64[ranks], bytes that each rank alone wants, and can read."""
    shared: Numbers
    """int32[n], the other stretches."""
    classes: Numbers
    """int32[n], their classes."""
    examples: Positions
    """int64[classes], a stretch of each class."""

    @property
    def reader_count(self) -> int:
        """Number of ranks of all classes."""
        return int(self.stretches.counts[self.examples].sum(dtype=np.int64))


def _separate(rows: Rows, places: Places) -> _Separated:
    """Separate what several ranks want, or the only one cannot read, from what each rank reads for itself alone."""
    stretches = sweep(rows)
    first_ranks = np.array([ranks[0] for ranks in rows.ranks], np.int64)
    alone = np.flatnonzero(stretches.counts == 1)
    readers = first_ranks[stretches.totals(np.arange(len(first_ranks), dtype=np.int32), alone)]
    if not places.can_read.all():
        able = places.can_read[places.sets[rows.objects_at(stretches.starts[alone])], readers]
        alone, readers = alone[able], readers[able]
    own_bytes = np.zeros(len(places.hosts), np.int64)
    np.add.at(own_bytes, readers, stretches.stops[alone] - stretches.starts[alone])
    mask = np.ones(len(stretches.starts), bool)
    mask[alone] = False
    shared = np.flatnonzero(mask).astype(np.int32)
    classes, examples = number_sets(rows, stretches, shared)
    return _Separated(stretches, own_bytes, shared, classes, shared[examples].astype(np.int64))


def _make_pieces(rows: Rows, found: _Separated, gap_bytes: int, largest_bytes: int) -> Pieces:
    """Make pieces of a good size of what is read for others."""
    follows = np.append(False, np.diff(found.shared) == 1)[: len(found.shared)]
    starts, stops = found.stretches.starts[found.shared], found.stretches.stops[found.shared]
    fair_bytes = int((stops - starts).sum()) // (PIECES_PER_RANK * len(found.own_bytes))
    piece_bytes = min(max(fair_bytes, SMALLEST_PIECE_BYTES), largest_bytes)
    pieces = cut_pieces(Pieces(starts, stops, found.classes, follows), rows, piece_bytes)
    return join_pieces(pieces, piece_bytes=piece_bytes, gap_bytes=gap_bytes)

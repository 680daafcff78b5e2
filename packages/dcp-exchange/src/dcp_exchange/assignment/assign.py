"""`assign`: from what each rank wants to who reads what."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from dcp_exchange.assignment.assignment import Assignment
from dcp_exchange.assignment.coarsening import coarsen, keep_whole
from dcp_exchange.assignment.columns import Positions
from dcp_exchange.assignment.kinds import Places, kinds_of, places_of
from dcp_exchange.assignment.owners import choose_owners
from dcp_exchange.assignment.pieces import Pieces, cut_pieces, join_pieces
from dcp_exchange.assignment.reader_sets import list_readers, number_sets
from dcp_exchange.assignment.rows import Group, Rows, line_up
from dcp_exchange.assignment.stretches import CHUNK, Stretches, sweep

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
    stretches = sweep(rows)
    found = _separate(rows, stretches, places)
    if found is None:
        rows = coarsen(rows, stretches, gap_bytes=gap_bytes, most_readers=MOST_READERS)
        stretches = sweep(rows)
        found = _separate(rows, stretches, places, may_refuse=False)
    del stretches  # more than half of the memory
    borders, readers = list_readers(rows, found.pieces.starts[found.examples])
    own_bytes, pieces = found.own_bytes, _resize(found.pieces, rows, len(hosts), gap_bytes, largest_piece_bytes)
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

    own_bytes: Positions
    """int64[ranks], bytes that each rank alone wants, and can read."""
    pieces: Pieces
    """The other stretches."""
    examples: Positions
    """int64[classes], a piece of each class."""


@overload
def _separate(rows: Rows, stretches: Stretches, places: Places) -> _Separated | None: ...
@overload
def _separate(rows: Rows, stretches: Stretches, places: Places, *, may_refuse: Literal[False]) -> _Separated: ...
def _separate(rows: Rows, stretches: Stretches, places: Places, *, may_refuse: bool = True) -> _Separated | None:
    """Separate what several ranks want, or the only one cannot read, from what each rank reads for itself alone.

    Returns:
        What was separated; None, if the caller may be refused, for too many pieces or sets of ranks.
    """
    if may_refuse and _count_readers(rows, stretches, np.flatnonzero(stretches.counts[:CHUNK] > 1)) > MOST_READERS:
        return None  # those of the first stretches are too many already
    own_bytes, is_alone = _find_own(rows, stretches, places)
    shared = np.flatnonzero(~is_alone).astype(np.int32)
    classes, examples = number_sets(rows, stretches, shared)
    readers = int(stretches.counts[shared[examples]].sum(dtype=np.int64))
    if may_refuse and (readers > MOST_READERS or len(shared) > MOST_PIECES):
        return None
    follows = np.append(False, np.diff(shared) == 1)[: len(shared)]
    return _Separated(own_bytes, Pieces(stretches.starts[shared], stretches.stops[shared], classes, follows), examples)


def _count_readers(rows: Rows, stretches: Stretches, chosen: Positions) -> int:
    """Return the number of ranks of all different sets of ranks that want the chosen stretches."""
    chosen_rows = chosen.astype(np.int32)
    _, examples = number_sets(rows, stretches, chosen_rows)
    return int(stretches.counts[chosen_rows[examples]].sum(dtype=np.int64))


def _find_own(rows: Rows, stretches: Stretches, places: Places) -> tuple[Positions, npt.NDArray[np.bool_]]:
    """Return the bytes that each rank alone wants, and can read, and which stretches these are."""
    first_ranks = np.array([ranks[0] for ranks in rows.ranks], np.int32)
    alone = np.flatnonzero(stretches.counts == 1).astype(np.int32)
    readers = first_ranks[stretches.totals(np.arange(len(first_ranks), dtype=np.int32), alone)]
    if not places.can_read.all():
        able = places.can_read[places.sets[rows.objects_at(stretches.starts[alone])], readers]
        alone, readers = alone[able], readers[able]
    own_bytes = np.zeros(len(places.hosts), np.int64)
    np.add.at(own_bytes, readers, stretches.stops[alone] - stretches.starts[alone])
    is_alone = np.zeros(len(stretches.starts), bool)
    is_alone[alone] = True
    return own_bytes, is_alone


def _resize(pieces: Pieces, rows: Rows, rank_count: int, gap_bytes: int, largest_bytes: int) -> Pieces:
    """Cut and join what is read for others to pieces of a good size."""
    fair_bytes = int((pieces.stops - pieces.starts).sum()) // (PIECES_PER_RANK * rank_count)
    piece_bytes = min(max(fair_bytes, SMALLEST_PIECE_BYTES), largest_bytes)
    return join_pieces(cut_pieces(pieces, rows, piece_bytes), piece_bytes=piece_bytes, gap_bytes=gap_bytes)

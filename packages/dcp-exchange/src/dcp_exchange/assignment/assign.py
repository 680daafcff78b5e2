"""`assign` decides which rank reads which bytes: an `Assignment`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from dcp_exchange.assignment.kinds import IMPOSSIBLE, Kinds, Places, kinds_of, level, places_of
from dcp_exchange.assignment.pieces import Pieces, cut_pieces, join_pieces
from dcp_exchange.assignment.rows import Group, Numbers, Positions, Rows, expand, line_up
from dcp_exchange.assignment.stretches import CHUNK, Hashes, Stretches, mixed, sweep

# Pieces: small enough that several are under way at a time, large enough that a request is not the larger cost.
PIECES_PER_RANK = 8
SMALLEST_PIECE_BYTES = 1 << 20
LARGEST_PIECE_BYTES = 32 << 20
GAP_BYTES = 16 << 10
MOST_PIECES = 1 << 22
# Of all classes together: 4 bytes each in the result, and about 50 while they are listed.
MOST_READERS = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Pieces of objects that one rank reads for several: columns, one row per piece, ascending, no overlaps.

    Bytes that only one rank wants and can read are in no piece. A class is a set of ranks that want the same pieces.

    Attributes:
        names: Names of the objects, ascending.
        objects: int32[n], position of the piece's object in `names`.
        starts: int64[n], first byte in the object.
        stops: int64[n], end, exclusive.
        owners: int32[n], rank that reads the piece.
        classes: int32[n].
        borders: int64[classes + 1]: class c has the ranks `readers[borders[c] : borders[c + 1]]`.
        readers: int32, ranks, ascending within a class.
    """

    names: tuple[str, ...]
    objects: Numbers
    starts: Positions
    stops: Positions
    owners: Numbers
    classes: Numbers
    borders: Positions
    readers: Numbers


def assign(
    groups: Sequence[Group],
    hosts: Sequence[int],
    *,
    holders: Mapping[str, Collection[int]] | None = None,
    gap_bytes: int = GAP_BYTES,
    largest_piece_bytes: int = LARGEST_PIECE_BYTES,
) -> Assignment:
    """Decide which rank reads which bytes, so that one rank reads each byte that several ranks want.

    The result depends on the demands, not on the order of the groups or on the machine. Time and memory grow with the
    number of rows, not of ranks. A rank in no group wants nothing, but may read for others. An owner can read its
    pieces, and also wants them if reads stay about equal.

    `hosts` has the host per rank, as any number. `holders` maps objects to hosts that have them; None if every rank can
    read all objects. Gaps up to `gap_bytes` between wanted ranges are read rather than skipped. Pieces have at most
    `largest_piece_bytes`, unless they must not be cut.

    Raises ValueError if a rank is in two groups or is not in the job, or no host has an object.
    """
    rows = _keep_whole(line_up(groups, len(hosts), gap_bytes))
    places = places_of(rows.names, hosts, holders)
    stretches = sweep(rows)
    found = _separate(rows, stretches, places)
    if found is None:
        rows = _coarsen(rows, stretches, gap_bytes=gap_bytes, most_readers=MOST_READERS)
        stretches = sweep(rows)
        found = _separate(rows, stretches, places, may_refuse=False)
    del stretches  # more than half of the memory
    borders, readers = _list_readers(rows, found.pieces.starts[found.examples])
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
    own_bytes: Positions
    """int64[ranks], bytes that only this rank wants, and can read."""
    pieces: Pieces
    examples: Positions
    """int64[classes], a piece per class."""


@overload
def _separate(rows: Rows, stretches: Stretches, places: Places) -> _Separated | None: ...
@overload
def _separate(rows: Rows, stretches: Stretches, places: Places, *, may_refuse: Literal[False]) -> _Separated: ...
def _separate(rows: Rows, stretches: Stretches, places: Places, *, may_refuse: bool = True) -> _Separated | None:
    """Return None if there are too many pieces or sets."""
    if may_refuse and _count_readers(rows, stretches, np.flatnonzero(stretches.counts[:CHUNK] > 1)) > MOST_READERS:
        return None  # those of the first stretches are too many already
    own_bytes, is_alone = _find_own(rows, stretches, places)
    shared = np.flatnonzero(~is_alone).astype(np.int32)
    classes, examples = _number_sets(rows, stretches, shared)
    readers = int(stretches.counts[shared[examples]].sum(dtype=np.int64))
    if may_refuse and (readers > MOST_READERS or len(shared) > MOST_PIECES):
        return None
    follows = np.append(False, np.diff(shared) == 1)[: len(shared)]
    return _Separated(own_bytes, Pieces(stretches.starts[shared], stretches.stops[shared], classes, follows), examples)


def _count_readers(rows: Rows, stretches: Stretches, chosen: Positions) -> int:
    chosen_rows = chosen.astype(np.int32)
    _, examples = _number_sets(rows, stretches, chosen_rows)
    return int(stretches.counts[chosen_rows[examples]].sum(dtype=np.int64))


def _find_own(rows: Rows, stretches: Stretches, places: Places) -> tuple[Positions, npt.NDArray[np.bool_]]:
    """Return the bytes that only one rank wants and can read, and their stretches."""
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
    fair_bytes = int((pieces.stops - pieces.starts).sum()) // (PIECES_PER_RANK * rank_count)
    piece_bytes = min(max(fair_bytes, SMALLEST_PIECE_BYTES), largest_bytes)
    return join_pieces(cut_pieces(pieces, rows, piece_bytes), piece_bytes=piece_bytes, gap_bytes=gap_bytes)


SMALLEST_CELL_BYTES = 1 << 20


def _keep_whole(rows: Rows) -> Rows:
    """Remove borders inside rows that must not be cut."""
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


def _coarsen(rows: Rows, stretches: Stretches, *, gap_bytes: int, most_readers: int) -> Rows:
    """Widen rows to borders of equal cells that list at most `most_readers` in all."""
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


def choose_owners(kinds: Kinds, sizes: Positions, own_bytes: Positions) -> Positions:
    """Choose the rank, int64[pieces], that reads each piece. A rank's pieces of one kind are neighbours."""
    kind_bytes = np.zeros(len(kinds.tiers), np.int64)
    np.add.at(kind_bytes, kinds.of_pieces, sizes)
    shares = level(kind_bytes, kinds.tiers, own_bytes)
    owners = np.empty(len(sizes), np.int64)
    order = np.argsort(kinds.of_pieces, kind="stable")
    borders = np.searchsorted(kinds.of_pieces[order], np.arange(len(kind_bytes) + 1))
    owed = np.zeros(len(own_bytes), np.int64)  # what whole pieces gave a rank too little so far
    for kind in range(len(kind_bytes)):
        pieces = order[borders[kind] : borders[kind + 1]]
        chosen = _split(sizes[pieces], shares[kind], owed)
        owners[pieces] = chosen
        owed += shares[kind]
        np.subtract.at(owed, chosen, sizes[pieces])
    _relieve(owners, sizes, kinds, own_bytes, own_bytes + shares.sum(axis=0))
    return owners


def _split(sizes: Positions, shares: Positions, owed: Positions) -> Positions:
    wanted = np.maximum(shares + owed, 0)
    wanted[shares == 0] = 0
    if not wanted.any():
        wanted = shares
    ranks = np.flatnonzero(wanted)
    if len(ranks) > len(sizes):
        ranks = np.sort(ranks[np.argsort(-wanted[ranks], kind="stable")[: len(sizes)]])
    ends = np.cumsum(wanted[ranks])
    middles = np.cumsum(sizes) - sizes / 2
    # Each quotient and product is rounded by itself, so that no machine has another result.
    found = np.searchsorted(ends * (sizes.sum() / ends[-1]), middles, "left")
    return ranks[np.minimum(found, len(ranks) - 1)]


def _relieve(owners: Positions, sizes: Positions, kinds: Kinds, own_bytes: Positions, targets: Positions) -> None:
    loads = own_bytes.copy()
    np.add.at(loads, owners, sizes)
    largest = int(sizes.max(initial=0))
    for rank in np.flatnonzero(loads > targets + largest).tolist():
        for piece in np.flatnonzero(owners == rank).tolist():
            if loads[rank] <= targets[rank] + largest:
                break
            able = np.flatnonzero(kinds.tiers[kinds.of_pieces[piece]] < IMPOSSIBLE)
            other = int(able[np.argmin((loads - targets)[able])])
            if loads[other] - targets[other] + sizes[piece] < loads[rank] - targets[rank]:
                owners[piece] = other
                loads[other] += sizes[piece]
                loads[rank] -= sizes[piece]


SLOT_BITS = 20


def _number_sets(rows: Rows, stretches: Stretches, chosen: Numbers) -> tuple[Numbers, Positions]:
    """Return int32[chosen], the class, and int64[classes], the position of its first stretch in `chosen`."""
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
    """Match stretches by a hash table; return those that are unlike the first stretch in their slot."""
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


def _list_readers(rows: Rows, positions: Positions) -> tuple[Positions, Numbers]:
    """Return borders, int64[positions + 1], and int32 ranks: `ranks[borders[p] : borders[p + 1]]` want position p."""
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

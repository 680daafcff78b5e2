"""Planning of reads: the range that each request must read to be verified, and which requests share a read.

Large items are split at borders of CRC blocks. No block is read twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import itemgetter

import numpy as np

from dcp_io.requests import ReadRequest, Verify
from dcp_io.stores.store import Store, SupportsReadPieces, SupportsReadSizes
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.index.columns import CRC_BLOCK_MIN_BYTES, ItemKind, StoredItem, block_bytes, border_count
from dcp_manifest.index.runs import Runs
from dcp_manifest.types import I64

# Requests for at least this much of an item are streamed; smaller ones share reads and are copied.
STREAM_MIN_BYTES = 256 << 10
# Largest gap between two neighbouring items in a file that is read rather than skipped.
GAP_BYTES = 16 << 10
# The same gap between two runs within an item: less than a page costs the storage nothing.
RUN_GAP_BYTES = 4 << 10
SHARED_LIMIT_BYTES = 4 << 20
# Taking a step costs as much as reading 200 KB. Its bytes need not fit into a cache (see `read_with_crc`), but each
# thread holds a step in memory if it cannot be read in place.
STEP_BYTES = 4 << 20
# A step in place needs no memory.
_IN_PLACE_BYTES = 8 << 20


class Check(IntEnum):
    """CRCs that verify a read; of several requests, the greatest counts."""

    NOTHING = 0
    BLOCKS = 1
    WHOLE = 2
    ARCHIVE = 3


@dataclass(slots=True, eq=False)
class Wanted:
    """A request, and the part [start, stop) of the stored range to read."""

    request: ReadRequest
    start: int
    stop: int
    check: Check
    base: int
    runs: Runs | None = None
    """Needed byte runs; None for the whole range."""


@dataclass(slots=True, eq=False)
class ItemRead:
    """A large item, read in steps."""

    members: tuple[Wanted, ...]
    item: StoredItem
    check: Check
    held: bool
    """Whether all bytes stay in memory until the last step."""
    start: int
    stop: int
    steps: int = 0
    memory: memoryview | None = None
    crcs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Position of a step → its CRC and length."""

    @property
    def base(self) -> int:
        """Offset of the stored range."""
        return self.members[0].base


@dataclass(slots=True, eq=False)
class Step:
    """Part [start, stop) of an item's stored range."""

    whole: ItemRead
    start: int
    stop: int
    members: tuple[Wanted, ...]


@dataclass(frozen=True, slots=True)
class SharedRead:
    """Range [start, stop) of a file for small requests."""

    start: int
    stop: int
    members: tuple[Wanted, ...]


@dataclass(frozen=True, slots=True)
class ReadSizes:
    """Sizes of reads that suit a storage."""

    gap_bytes: int
    """Largest gap between small items that is read rather than skipped."""
    run_gap_bytes: int
    """Largest gap between runs of one item that is read rather than skipped."""
    step_bytes: int
    """Steps of a large item."""
    piece_bytes: int | None = None
    """Pieces of a step that is checked; None: read it in one call."""

    @classmethod
    def of(cls, store: Store) -> ReadSizes:
        """Return the store's own sizes, or those for disks."""
        piece_bytes = store.read_piece_bytes if isinstance(store, SupportsReadPieces) else None
        if not isinstance(store, SupportsReadSizes):
            return cls(GAP_BYTES, RUN_GAP_BYTES, STEP_BYTES, piece_bytes)
        run_gap_bytes = max(RUN_GAP_BYTES, store.read_gap_bytes)
        return cls(store.read_gap_bytes, run_gap_bytes, store.read_step_bytes, piece_bytes)


def want(request: ReadRequest, verify: Verify, *, run_gap_bytes: int = RUN_GAP_BYTES) -> Wanted:
    """Choose the range to read for a request, wide enough for the check that `verify` selects."""
    item = request.item
    start, stop, size = request.start, request.stop, item.stored_bytes
    if not 0 <= start <= stop <= size:
        raise ValueError(f"bytes {start} to {stop} of {request.key!r} are outside its stored range")
    if request.into is not None and (len(request.into) != stop - start or request.piece is not None):
        raise ValueError(
            f"the destination of {request.key!r} has {len(request.into)} bytes but {stop - start} are wanted, "
            "or the request also has a piece function"
        )
    if item.offset < 0 or item.lead < 0 or item.lead + size > item.length:
        raise _impossible(request, "an impossible place")
    running = item.running_crcs
    if running is not None and len(running) != (0 if size <= CRC_BLOCK_MIN_BYTES else border_count(size)):
        raise _impossible(request, "a wrong number of CRCs")
    check = _check_of(request, verify)
    runs = None
    if check >= Check.WHOLE or (check is Check.BLOCKS and (size <= CRC_BLOCK_MIN_BYTES or verify == "full")):
        start, stop = 0, size
    else:
        runs = None if request.runs is None else request.runs.joined(run_gap_bytes)
        if check is Check.BLOCKS:
            start, stop = align_to_blocks(item, start, stop)
    return Wanted(request, start, stop, check, item.offset + item.lead, runs)


def _impossible(request: ReadRequest, what: str) -> CorruptCheckpointError:
    item = request.item
    return CorruptCheckpointError(f"the index gives {what}", file=item.file, key=request.key, offset=item.offset)


def _check_of(request: ReadRequest, verify: Verify) -> Check:
    item = request.item
    if verify is False or request.start == request.stop:
        return Check.NOTHING
    if item.crc32 is not None and (item.running_crcs is not None or not border_count(item.stored_bytes)):
        return Check.BLOCKS
    if verify != "full" and (request.start > 0 or request.stop < item.stored_bytes):
        return Check.NOTHING
    if item.crc32 is not None:
        return Check.WHOLE
    return Check.ARCHIVE if item.kind is ItemKind.ARCHIVE else Check.NOTHING


def plan_reads(wanted: Sequence[Wanted], sizes: ReadSizes, *, rehearse: bool) -> list[Step | SharedRead]:
    """Plan one file's reads, in ascending order."""
    # Two contradictory records of one location count as two items: each is checked against its own CRC.
    items: dict[tuple[int, int, int | None], list[Wanted]] = {}
    for one in wanted:
        item = one.request.item
        items.setdefault((one.base, item.stored_bytes, item.crc32), []).append(one)
    small: list[Wanted] = []
    placed: list[tuple[int, Step | SharedRead]] = []
    for (base, _, _), members in items.items():
        if max([one.stop for one in members]) - min([one.start for one in members]) < STREAM_MIN_BYTES:
            small += members
        else:
            placed += [(base + step.start, step) for step in _item_steps(members, sizes, rehearse)]
    ranges = [(one.base + one.start, one.base + one.stop) for one in small]
    limit = min(SHARED_LIMIT_BYTES, sizes.step_bytes)
    for (start, stop), positions in merge_ranges(ranges, gap_bytes=sizes.gap_bytes, limit_bytes=limit):
        placed.append((start, SharedRead(start, stop, tuple(small[position] for position in positions))))
    placed.sort(key=itemgetter(0))
    return [read for _, read in placed]


def _item_steps(members: Sequence[Wanted], sizes: ReadSizes, rehearse: bool) -> list[Step]:
    check = max(one.check for one in members)
    item = next(one.request.item for one in members if one.check is check)
    stored_bytes = item.stored_bytes
    at_once = any(one.request.into is None and one.request.piece is None for one in members)
    whole = ItemRead(
        tuple(members),
        item,
        check,
        check is Check.ARCHIVE or (at_once and not rehearse),
        min(one.start for one in members),
        max(one.stop for one in members),
    )
    block = block_bytes(stored_bytes)
    # At each border some members become active or inactive. Borders are at CRC blocks, so each block is in one step.
    changes: dict[int, tuple[list[Wanted], list[Wanted]]] = defaultdict(lambda: ([], []))
    for one in members:
        changes[one.start // block * block][0].append(one)
        changes[min(stored_bytes, -(-one.stop // block) * block)][1].append(one)
    active: dict[int, Wanted] = {}
    steps: list[Step] = []
    position = 0
    for border in sorted(changes):
        if active:
            now = tuple(active.values())
            in_place = is_in_place(now, whole, rehearse) and sizes.piece_bytes is not None
            step_bytes = max(sizes.step_bytes, _IN_PLACE_BYTES) if in_place else sizes.step_bytes
            for start, stop in split_range(position, border, step_bytes=step_bytes, align_bytes=block):
                steps.append(Step(whole, start, stop, now))
        begin, end = changes[border]
        for one in end:
            active.pop(id(one), None)
        for one in begin:
            active[id(one)] = one
        position = border
    whole.steps = len(steps)
    return steps


def is_in_place(members: Sequence[Wanted], whole: ItemRead, rehearse: bool) -> bool:
    """Return whether a step is read into its destination."""
    return len(members) == 1 and members[0].request.into is not None and not rehearse and not whole.held


def parts_to_read(step: Step, *, run_gap_bytes: int = RUN_GAP_BYTES) -> list[tuple[int, int]]:
    """Return the parts of a step to read, as positions in the stored range."""
    check = step.whole.check
    if check >= Check.WHOLE or (check is Check.BLOCKS and any(one.runs is None for one in step.members)):
        return [(step.start, step.stop)]
    if len(step.members) == 1 and step.members[0].runs is None:
        return [(max(step.start, step.members[0].start), min(step.stop, step.members[0].stop))]
    found = [_runs_of(one).within(step.start, step.stop) for one in step.members]
    starts, stops = (np.concatenate(side) for side in zip(*found, strict=True))
    return _parts(starts, stops, check, step.whole.item.stored_bytes, run_gap_bytes)


def parts_of(one: Wanted, *, run_gap_bytes: int = RUN_GAP_BYTES) -> list[tuple[int, int]]:
    """Return the parts of a request's range to read."""
    if one.check >= Check.WHOLE or one.runs is None:
        return [(one.start, one.stop)]
    size, runs = one.request.item.stored_bytes, one.runs
    if one.check is Check.BLOCKS:  # a gap below a block's size spares no block
        runs = runs.joined(block_bytes(size))
    return _parts(*runs.within(one.start, one.stop), one.check, size, run_gap_bytes)


def _parts(starts: I64, stops: I64, check: Check, size: int, run_gap_bytes: int) -> list[tuple[int, int]]:
    if check is Check.BLOCKS:
        block, run_gap_bytes = block_bytes(size), 1
        starts, stops = starts // block * block, np.minimum(-(-stops // block) * block, size)
    starts, stops = merge_runs(starts, stops, gap_bytes=run_gap_bytes)
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _runs_of(one: Wanted) -> Runs:
    return Runs(one.start, one.stop - one.start) if one.runs is None else one.runs


Range = tuple[int, int]


def merge_ranges(ranges: Sequence[Range], *, gap_bytes: int, limit_bytes: int) -> list[tuple[Range, list[int]]]:
    """Group ranges that overlap or are at most `gap_bytes` apart, by range and positions, ascending.

    A group exceeds `limit_bytes` only if a single range does.
    """
    groups: list[tuple[Range, list[int]]] = []
    wanted = 0  # end of the wanted bytes of the last group
    for position in sorted(range(len(ranges)), key=ranges.__getitem__):
        start, stop = ranges[position]
        if groups:
            (first, last), members = groups[-1]
            end = max(last, stop)
            if start - wanted <= gap_bytes and end - first <= limit_bytes:
                members.append(position)
                groups[-1] = ((first, end), members)
                wanted = max(wanted, stop) if start < stop else wanted
                continue
        groups.append(((start, stop), [position]))
        wanted = stop
    return groups


def align_to_blocks(item: StoredItem, start: int, stop: int) -> Range:
    """Return the smallest part of the stored range around [start, stop) that CRCs verify."""
    if start == stop:
        return start, stop
    if item.running_crcs is None and border_count(item.stored_bytes):
        return 0, item.stored_bytes
    block = block_bytes(item.stored_bytes)
    return start // block * block, min(item.stored_bytes, -(-stop // block) * block)


def range_of_values(item: StoredItem, start: int, stop: int) -> Range:
    """Return the half-open part of the stored range with the decoded bytes [start, stop)."""
    if item.blocks is not None:
        first, last = start // item.blocks.block_bytes, -(-stop // item.blocks.block_bytes)
        before = int(item.blocks.lengths[:first].sum())
        return before, before + int(item.blocks.lengths[first:last].sum())
    if item.kind is not ItemKind.RAW:
        return 0, item.stored_bytes
    return (start, stop) if item.crc32 is None else align_to_blocks(item, start, stop)


def split_range(start: int, stop: int, *, step_bytes: int, align_bytes: int) -> Iterator[Range]:
    """Split a range into steps, at multiples of `align_bytes`."""
    step = max(1, step_bytes // align_bytes) * align_bytes
    while start < stop:
        border = min(stop, (start // align_bytes) * align_bytes + step)
        yield start, border
        start = border


def merge_runs(starts: I64, stops: I64, *, gap_bytes: int) -> tuple[I64, I64]:
    """Merge nonempty runs that overlap or are less than `gap_bytes` apart."""
    if len(starts) < 2:
        return starts, stops
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    breaks = np.flatnonzero(starts[1:] - stops[:-1] >= gap_bytes) + 1
    return starts[np.concatenate(([0], breaks))], stops[np.concatenate((breaks - 1, [len(stops) - 1]))]

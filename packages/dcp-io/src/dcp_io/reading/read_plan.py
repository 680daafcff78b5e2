"""Planning of reads: the range that each request must read to be verified, and which requests share a read.

Pure planning; `read_engine` carries the reads out. Small items that are neighbours in a file share one read. Large
items are streamed: each is split into steps at borders of CRC blocks, and a step serves every request that overlaps it.
No block is read twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from dcp_io.layout_choices import Verify
from dcp_io.reading.byte_ranges import align_to_blocks, merge_ranges, merge_runs, split_range
from dcp_io.requests import ReadRequest
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.index.items import CRC_BLOCK_MIN_BYTES, ItemKind, StoredItem, block_bytes, border_count
from dcp_manifest.index.runs import Runs

__all__ = ["Check", "ItemRead", "SharedRead", "Step", "Wanted", "parts_of", "parts_to_read", "plan_reads", "want"]

# Requests for at least this much of an item are streamed; smaller ones share reads and are copied.
STREAM_MIN_BYTES = 256 << 10
# Largest gap between two wanted ranges that is read rather than skipped: between neighbouring items in a file, ...
GAP_BYTES = 16 << 10
# ... and between runs within an item (less than a page costs the storage nothing).
RUN_GAP_BYTES = 4 << 10
SHARED_LIMIT_BYTES = 4 << 20
# Limit of one step: small enough to be checked while in the processor's cache, and to spread over the threads. #
# Measured: with smaller steps, waiting for the GIL costs more than the faster cache saves.
STEP_BYTES = 2 << 20


class Check(IntEnum):
    """Kind of CRCs that verify a read. If requests for one item need different kinds, the greatest number is used."""

    NOTHING = 0
    BLOCKS = 1
    """The CRCs recorded at the borders of blocks."""
    WHOLE = 2
    """The single CRC of an item that has no CRCs at block borders."""
    ARCHIVE = 3
    """The CRCs of the records in the item, which is a `torch.save` archive."""


@dataclass(slots=True, eq=False)
class Wanted:
    """A read request, with the part [start, stop) of the stored range to read for it, and the CRC check to apply."""

    request: ReadRequest
    start: int
    stop: int
    check: Check
    base: int
    """Position of the stored range in its file, bytes."""
    runs: Runs | None = None
    """Byte runs of the range that are needed; None if the whole range is needed."""


@dataclass(slots=True, eq=False)
class ItemRead:
    """A large item that is read in steps, with all requests for bytes of the item."""

    members: tuple[Wanted, ...]
    item: StoredItem
    check: Check
    held: bool
    """Whether all bytes stay in memory until the last step, because a request or the check needs them together."""
    start: int
    stop: int
    steps: int = 0
    """Number of steps still to be read."""
    memory: memoryview | None = None
    """Buffer for [start, stop), if `held`."""
    crcs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """With `Check.WHOLE`: position of each finished step → its CRC and length."""

    @property
    def base(self) -> int:
        """Position of the stored range in its file, bytes."""
        return self.members[0].base


@dataclass(slots=True, eq=False)
class Step:
    """The part [start, stop) of an item's stored range, and the requests whose ranges cover it."""

    whole: ItemRead
    start: int
    stop: int
    members: tuple[Wanted, ...]


@dataclass(frozen=True, slots=True)
class SharedRead:
    """A range [start, stop) of a file that is read into a buffer for small requests, possibly of several items."""

    start: int
    stop: int
    members: tuple[Wanted, ...]


def want(request: ReadRequest, verify: Verify, *, run_gap_bytes: int = RUN_GAP_BYTES) -> Wanted:
    """Choose the byte range to read for a request, wide enough for the CRC check that `verify` selects.

    Args:
        request: The request.
        verify: CRC checks of the data; see `Verify`.
        run_gap_bytes: Largest gap between two runs of the item that is read rather than skipped.

    Raises:
        ValueError: The request's range or destination does not fit its item.
        CorruptCheckpointError: The index gives the item an impossible location or number of CRCs.
    """
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


def plan_reads(
    wanted: Sequence[Wanted], *, rehearse: bool, step_bytes: int, gap_bytes: int | None = None
) -> list[Step | SharedRead]:
    """Plan the reads of one file, in ascending order.

    Args:
        wanted: Non-empty ranges of items in one file, which is known to be long enough.
        rehearse: Whether the bytes are only read and checked, without delivery to the requests.
        step_bytes: Limit of the size of a step (but at least one CRC block), and of a shared read of small items.
        gap_bytes: Largest gap between two small items that is read rather than skipped; None for the default for disks.
    """
    # Two contradictory records of one location count as two items: each is checked against its own CRC.
    items: dict[tuple[int, int, int | None], list[Wanted]] = {}
    for one in wanted:
        item = one.request.item
        items.setdefault((one.base, item.stored_bytes, item.crc32), []).append(one)
    small: list[Wanted] = []
    placed: list[tuple[int, Step | SharedRead]] = []
    for (base, _, _), members in items.items():
        if max(one.stop for one in members) - min(one.start for one in members) < STREAM_MIN_BYTES:
            small += members
        else:
            placed += ((base + step.start, step) for step in _item_steps(members, rehearse, step_bytes))
    ranges = [(one.base + one.start, one.base + one.stop) for one in small]
    limit = min(SHARED_LIMIT_BYTES, step_bytes)
    gap = GAP_BYTES if gap_bytes is None else gap_bytes
    for (start, stop), positions in merge_ranges(ranges, gap_bytes=gap, limit_bytes=limit):
        placed.append((start, SharedRead(start, stop, tuple(small[position] for position in positions))))
    placed.sort(key=lambda pair: pair[0])
    return [read for _, read in placed]


def _item_steps(members: Sequence[Wanted], rehearse: bool, step_bytes: int) -> list[Step]:
    """Return the steps of one item; each of its bytes is in at most one step."""
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


def parts_to_read(step: Step, *, run_gap_bytes: int = RUN_GAP_BYTES) -> list[tuple[int, int]]:
    """Return the parts of a step that must be read, as ascending half-open ranges of positions in the stored range.

    With `Check.BLOCKS` these are whole blocks; without a check, the wanted runs; runs with gaps of less than
    `run_gap_bytes` between them are joined.
    """
    check = step.whole.check
    if check >= Check.WHOLE or (check is Check.BLOCKS and any(one.runs is None for one in step.members)):
        return [(step.start, step.stop)]
    if len(step.members) == 1 and step.members[0].runs is None:
        return [(max(step.start, step.members[0].start), min(step.stop, step.members[0].stop))]
    found = [_runs_of(one).within(step.start, step.stop) for one in step.members]
    starts, stops = (np.concatenate(side) for side in zip(*found, strict=True))
    if check is Check.BLOCKS and len(starts):
        size = step.whole.item.stored_bytes
        block = block_bytes(size)
        starts, stops = starts // block * block, np.minimum(-(-stops // block) * block, size)
        starts, stops = merge_runs(starts, stops, gap_bytes=1)
    else:
        starts, stops = merge_runs(starts, stops, gap_bytes=run_gap_bytes)
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def parts_of(one: Wanted, *, run_gap_bytes: int = RUN_GAP_BYTES) -> list[tuple[int, int]]:
    """Return the parts of a request's range that must be read, like `parts_to_read` for a step of the whole range."""
    if one.check >= Check.WHOLE or one.runs is None:
        return [(one.start, one.stop)]
    if one.check is not Check.BLOCKS:
        starts, stops = merge_runs(*one.runs.within(one.start, one.stop), gap_bytes=run_gap_bytes)
        return list(zip(starts.tolist(), stops.tolist(), strict=True))
    size = one.request.item.stored_bytes
    block = block_bytes(size)
    starts, stops = one.runs.joined(block).within(one.start, one.stop)  # a gap below a block's size spares no block
    starts, stops = merge_runs(starts // block * block, np.minimum(-(-stops // block) * block, size), gap_bytes=1)
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _runs_of(one: Wanted) -> Runs:
    return Runs(one.start, one.stop - one.start) if one.runs is None else one.runs

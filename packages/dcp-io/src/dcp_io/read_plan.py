"""From read requests to reads: which bytes each request needs so that they can be verified, and which reads to share.

Pure planning; the reads themselves are in `read_engine`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from dcp_io.ranges import align_to_blocks, merge_ranges, split_range
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.items import Framing, block_bytes, border_count
from dcp_manifest.requests import ReadRequest

__all__ = ["Check", "DirectRead", "SharedRead", "Verify", "Wanted", "plan_reads", "want"]

Verify = Literal["blocks", "full", "before"] | bool
"""`blocks` (or True): check the CRC blocks that a read touches. `full`: check whole items. `before`: as `blocks`, but
everything is checked before any destination changes. False: check nothing."""

# A destination this large is read into directly; smaller ones share reads and are copied.
DIRECT_MIN_BYTES = 256 << 10
# Unwanted bytes between two wanted ranges that are read rather than skipped.
GAP_BYTES = 16 << 10
SHARED_LIMIT_BYTES = 4 << 20
# Size of the pieces of a large read: checked while they are in the processor's cache, spread over the threads.
STEP_BYTES = 8 << 20


class Check(Enum):
    """What proves that the bytes of a read are those that were written."""

    NOTHING = 0
    CRC = 1
    ARCHIVE = 2
    """The CRCs inside the archive that the item is."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, the range of the stored range that is read for it, and what that range is checked against."""

    request: ReadRequest
    start: int
    stop: int
    check: Check

    @property
    def base(self) -> int:
        """Position of the stored range in its file."""
        return self.request.item.offset + self.request.item.lead


@dataclass(frozen=True, slots=True)
class DirectRead:
    """A piece [start, stop) of one request's range that goes straight to its destination."""

    wanted: Wanted
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SharedRead:
    """A range [start, stop) of a file that serves several requests by way of a buffer."""

    start: int
    stop: int
    members: tuple[Wanted, ...]


def want(request: ReadRequest, verify: Verify) -> Wanted:
    """What must be read for a request so that it can be checked as `verify` asks.

    Raises:
        ValueError: The request's range or destination contradicts its item.
        CorruptCheckpointError: The item's place is impossible.
    """
    item = request.item
    if not 0 <= request.start <= request.stop <= item.stored_bytes:
        raise ValueError(f"bytes {request.start} to {request.stop} of {request.key!r} are not in its stored range")
    if request.into is not None and len(request.into) != request.stop - request.start:
        raise ValueError(f"the destination of {request.key!r} has {len(request.into)} bytes, not as many as are read")
    if item.offset < 0 or item.lead < 0 or item.lead + item.stored_bytes > item.length:
        raise CorruptCheckpointError(
            "the index gives an impossible place", file=item.file, key=request.key, offset=item.offset
        )
    if item.running_crcs is not None and len(item.running_crcs) != border_count(item.stored_bytes):
        raise CorruptCheckpointError(
            "the index gives a wrong number of CRCs", file=item.file, key=request.key, offset=item.offset
        )
    whole = request.start == 0 and request.stop == item.stored_bytes
    if verify is False or request.start == request.stop:
        return Wanted(request, request.start, request.stop, Check.NOTHING)
    if item.crc32 is not None:
        start, stop = align_to_blocks(item, request.start, request.stop)
        if verify == "full":
            start, stop = 0, item.stored_bytes
        return Wanted(request, start, stop, Check.CRC)
    if item.framing is not Framing.RAW and not item.chain and (whole or verify == "full"):
        return Wanted(request, 0, item.stored_bytes, Check.ARCHIVE)
    return Wanted(request, request.start, request.stop, Check.NOTHING)


def plan_reads(wanted: Sequence[Wanted], *, rehearse: bool) -> list[tuple[str, list[DirectRead | SharedRead]]]:
    """The reads of each file, in ascending order within the file.

    No byte is read twice for shared reads; neighbours a small gap apart become one read.

    Args:
        wanted: Of non-empty ranges.
        rehearse: The reads are only checked: destinations do not count.
    """
    files: dict[str, list[Wanted]] = defaultdict(list)
    for one in wanted:
        files[one.request.item.file].append(one)
    return [(file, list(_file_reads(members, rehearse=rehearse))) for file, members in files.items()]


def _file_reads(wanted: Sequence[Wanted], *, rehearse: bool) -> Iterator[DirectRead | SharedRead]:
    shared: list[Wanted] = []
    for one in wanted:
        if not _is_direct(one, rehearse=rehearse):
            shared.append(one)
            continue
        block = block_bytes(one.request.item.stored_bytes)
        if one.check is Check.CRC and one.request.item.running_crcs is None:
            yield DirectRead(one, one.start, one.stop)
            continue
        for start, stop in split_range(one.start, one.stop, step_bytes=STEP_BYTES, align_bytes=block):
            yield DirectRead(one, start, stop)
    ranges = [(one.base + one.start, one.base + one.stop) for one in shared]
    for (start, stop), members in merge_ranges(ranges, gap_bytes=GAP_BYTES, limit_bytes=SHARED_LIMIT_BYTES):
        yield SharedRead(start, stop, tuple(shared[member] for member in members))


def _is_direct(one: Wanted, *, rehearse: bool) -> bool:
    if one.check is Check.ARCHIVE or one.stop - one.start < DIRECT_MIN_BYTES:
        return False
    return rehearse or one.request.into is not None

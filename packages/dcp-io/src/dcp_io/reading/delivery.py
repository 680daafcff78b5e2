"""`Delivery`: delivers bytes that any process has read to this process's requests."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dcp_base.errors import DcpError
from dcp_io.archives.crc import crc32
from dcp_io.reading.block_reads import with_blocks_apart
from dcp_io.reading.crc_checks import Demands, check_archive, check_blocks, check_whole, make_pages
from dcp_io.reading.read_plan import RUN_GAP_BYTES, Check, Range, Wanted, parts_of, want
from dcp_io.requests import ReadRequest, Verify
from dcp_manifest.index.columns import CRC_BLOCK_MAX_BYTES, block_bytes

_NO_BYTES = memoryview(b"")


@dataclass(slots=True, eq=False)
class _Arrival:
    wanted: Wanted
    parts: list[Range]
    left: int
    """Missing bytes of these parts, plus one per request for the rest."""
    memory: memoryview | None = None
    crcs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Position of a piece → its CRC and length."""


class Delivery:
    """Delivers pieces of files to the read requests of one rank, in any order, from any thread.

    `done` is called once, after all bytes of the request were checked and delivered. For requests and errors see
    `read_items`.

    Args:
        verify: CRC checks of the data: `blocks`, `full` or False.
        run_gap_bytes: Largest gap between two runs of an item that is read rather than skipped.
        changed_keys: Gets each request's key before its destination changes.
        count: Called with the number of bytes per delivered part.
    """

    def __init__(
        self,
        requests: Sequence[ReadRequest],
        *,
        verify: Verify = "blocks",
        run_gap_bytes: int = RUN_GAP_BYTES,
        changed_keys: set[str] | None = None,
        count: Callable[[int], object] | None = None,
    ) -> None:
        if verify == "before":
            raise ValueError("verify='before' reads all bytes before it delivers any: use read_items")
        self._changed = set() if changed_keys is None else changed_keys
        self._count = count
        self._lock = threading.Lock()
        self._waiting = 0
        self._files: dict[str, _PartsOfFile] = {}
        self._empty: list[ReadRequest] = []
        self._arrivals: list[_Arrival] = []
        for request in with_blocks_apart(requests, whole=verify == "full"):
            one = want(request, verify, run_gap_bytes=run_gap_bytes)
            if one.start == one.stop:
                self._empty.append(request)
                continue
            parts = [(one.base + start, one.base + stop) for start, stop in parts_of(one, run_gap_bytes=run_gap_bytes)]
            self._arrivals.append(_Arrival(one, parts, 0))
        self.unverified = {one.wanted.request.key for one in self._arrivals if one.wanted.check is Check.NOTHING}
        """Keys of requests without a CRC."""
        self.demands = _demands(self._arrivals)
        """Byte ranges of all requests."""
        self._expect(self._arrivals)

    def left_alone(self, shared: Mapping[str, Sequence[Range]]) -> list[ReadRequest]:
        """Exclude all bytes outside the shared ranges, and return requests for them, for `read_items`.

        `shared` has the ascending ranges per file that `take` will get. They cut a demand only at a grain.
        """
        alone: list[ReadRequest] = []
        kept: list[_Arrival] = []
        for one in self._arrivals:
            inside, outside = _divide(one.parts, shared.get(one.wanted.request.item.file, ()))
            if not inside:
                alone.append(one.wanted.request)
                continue
            one.parts = inside
            rest = self._rest(one, outside)
            one.left = len(rest)
            alone += rest
            kept.append(one)
        self._arrivals = kept
        self._expect(kept)
        return alone

    def take(self, file: str, start: int, data: memoryview, *, checked: bool) -> None:
        """Deliver a piece of a file, at offset `start`, to all requests that want bytes of it. Thread-safe.

        `data` must not change until the method returns, and cuts a demand only at a grain. `checked` means that
        `check`, here or in another process, returned True for it. Raises CorruptCheckpointError with file, key and
        offset.
        """
        for one, first, last in self._overlapping(file, start, start + len(data)):
            self._deliver(one, first - one.wanted.base, data[first - start : last - start], checked=checked)

    def check(self, file: str, start: int, data: memoryview) -> bool:
        """Check a piece of a file, without delivering it. Raises CorruptCheckpointError with file, key and offset.

        Returns True if all wanted bytes of the piece have matching CRCs at block borders; otherwise `take` checks what
        it can.
        """
        found = False
        for one, first, last in self._overlapping(file, start, start + len(data)):
            found = True
            wanted = one.wanted
            if wanted.check is not Check.BLOCKS:
                return False
            view = data[first - start : last - start]
            check_blocks(wanted.request.key, wanted.request.item, first - wanted.base, last - wanted.base, [view])
        return found

    def key_at(self, file: str, start: int, stop: int) -> str | None:
        """Return the key of a request that wants bytes of [start, stop) of a file."""
        return next((one.wanted.request.key for one, _, _ in self._overlapping(file, start, stop)), None)

    @property
    def missing_bytes(self) -> int:
        """Bytes that have not been delivered."""
        return sum(one.left for one in self._arrivals)

    def finish(self) -> None:
        """Call `done` of requests for no bytes; DcpError if bytes are missing."""
        if self._waiting:
            keys = sorted({one.wanted.request.key for one in self._arrivals if one.left})
            raise DcpError(f"{self._waiting} requests did not get all of their bytes, the first for {keys[0]!r}")
        for request in self._empty:
            self._changed.add(request.key)
            _finish(request, _NO_BYTES)

    def _expect(self, arrivals: Sequence[_Arrival]) -> None:
        by_file: defaultdict[str, list[tuple[int, int, _Arrival]]] = defaultdict(list)
        for one in arrivals:
            one.left += sum(stop - start for start, stop in one.parts)
            for start, stop in one.parts:
                by_file[one.wanted.request.item.file].append((start, stop, one))
        self._files = {name: _PartsOfFile(parts) for name, parts in by_file.items()}
        self._waiting = len(arrivals)

    def _overlapping(self, file: str, start: int, stop: int) -> Iterator[tuple[_Arrival, int, int]]:
        parts = self._files.get(file)
        return iter(()) if parts is None else parts.overlapping(start, stop)

    def _rest(self, one: _Arrival, outside: Sequence[Range]) -> list[ReadRequest]:
        wanted, request = one.wanted, one.wanted.request
        rest: list[ReadRequest] = []
        for first, last in outside:
            start, stop = max(first - wanted.base, request.start), min(last - wanted.base, request.stop)
            if start >= stop:  # read only for a CRC
                continue
            if _is_whole(wanted):
                # These bytes are checked together with the shared bytes, when all have arrived.
                item = replace(request.item, crc32=None, running_crcs=None)
                rest.append(
                    ReadRequest(request.key, item, start, stop, None, self._rest_done(one), self._rest_piece(one))
                )
                continue
            into = None if request.into is None else request.into[start - request.start : stop - request.start]
            rest.append(replace(request, start=start, stop=stop, into=into, done=self._rest_done(one)))
        return rest

    def _rest_done(self, one: _Arrival) -> Callable[[memoryview], None]:
        return lambda _: self._arrived(one, 1)

    def _rest_piece(self, one: _Arrival) -> Callable[[int, memoryview], None]:
        return lambda position, data: self._place(one, position, data)

    def _deliver(self, one: _Arrival, position: int, data: memoryview, *, checked: bool) -> None:
        wanted, request = one.wanted, one.wanted.request
        if wanted.check is Check.BLOCKS and not checked:
            check_blocks(request.key, request.item, position, position + len(data), [data])
        self._place(one, position, data)
        self._arrived(one, len(data))
        if self._count is not None:
            self._count(len(data))

    def _place(self, one: _Arrival, position: int, data: memoryview) -> None:
        wanted, request = one.wanted, one.wanted.request
        if wanted.check is Check.WHOLE:
            value = crc32(data)
            with self._lock:
                one.crcs[position] = value, len(data)
        if _is_held(wanted):
            with self._lock:
                if one.memory is None:
                    one.memory = np.empty(wanted.stop - wanted.start, np.uint8).data
            _copy(one.memory, position - wanted.start, data)
            return
        self._changed.add(request.key)
        start, stop = max(position, request.start), min(position + len(data), request.stop)
        if start >= stop:
            return
        data = data[start - position : stop - position]
        if request.into is not None:
            _copy(request.into, start - request.start, data)
        elif request.piece is not None:
            request.piece(start, data)

    def _arrived(self, one: _Arrival, amount: int) -> None:
        with self._lock:
            one.left -= amount
            complete = one.left == 0
        if not complete:
            return
        wanted, request, memory = one.wanted, one.wanted.request, one.memory
        if wanted.check is Check.WHOLE:
            check_whole(request.key, request.item, one.crcs)
        elif memory is not None and wanted.check is Check.ARCHIVE:
            self._check_archive(request, memory)
        self._changed.add(request.key)
        held = _NO_BYTES
        if memory is not None:
            held, one.memory = memory[request.start - wanted.start : request.stop - wanted.start], None
            if request.into is not None:
                _copy(request.into, 0, held)
            elif request.piece is not None:
                request.piece(request.start, held)
        _finish(request, held)
        with self._lock:
            self._waiting -= 1

    def _check_archive(self, request: ReadRequest, memory: memoryview) -> None:
        if not check_archive(request.key, request.item, memory):
            with self._lock:
                self.unverified.add(request.key)


class _PartsOfFile:
    def __init__(self, parts: list[tuple[int, int, _Arrival]]) -> None:
        parts.sort(key=lambda part: part[0])
        self._parts = parts
        self._starts = [start for start, _, _ in parts]
        # Two records may name the same bytes, so a part may end after one that begins later.
        self._furthest = np.maximum.accumulate(np.array([stop for _, stop, _ in parts], np.int64)).tolist()

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[_Arrival, int, int]]:
        position = bisect_left(self._starts, stop)
        while position and self._furthest[position - 1] > start:
            position -= 1
            first, last, one = self._parts[position]
            if last > start:
                yield one, max(first, start), min(last, stop)


def _is_whole(wanted: Wanted) -> bool:
    return wanted.check >= Check.WHOLE or _is_held(wanted)


def _is_held(wanted: Wanted) -> bool:
    request = wanted.request
    return wanted.check is Check.ARCHIVE or (request.into is None and request.piece is None)


def _demands(arrivals: Sequence[_Arrival]) -> Demands:
    names: dict[str, int] = {}
    rows: list[tuple[int, int, int, int]] = []
    for one in arrivals:
        item = one.wanted.request.item
        name = names.setdefault(item.file, len(names))
        grain = block_bytes(item.stored_bytes) if one.wanted.check is Check.BLOCKS else CRC_BLOCK_MAX_BYTES
        rows += [(name, start, stop, grain) for start, stop in one.parts]
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return Demands.of([*names], *columns)


def _divide(parts: Sequence[Range], shared: Sequence[Range]) -> tuple[list[Range], list[Range]]:
    inside: list[Range] = []
    outside: list[Range] = []
    for start, stop in parts:
        at = start
        position = max(0, bisect_left(shared, (start, start)) - 1)
        while position < len(shared) and shared[position][0] < stop:
            first, last = max(shared[position][0], start), min(shared[position][1], stop)
            if first < last:
                if at < first:
                    outside.append((at, first))
                if inside and inside[-1][1] == first:
                    inside[-1] = inside[-1][0], last
                else:
                    inside.append((first, last))
                at = last
            position += 1
        if at < stop:
            outside.append((at, stop))
    return inside, outside


def _copy(target: memoryview, position: int, data: memoryview) -> None:
    # Copying arrays lets other threads run, copying memoryviews does not.
    place = target[position : position + len(data)]
    make_pages(place)
    np.frombuffer(place, np.uint8)[:] = np.frombuffer(data, np.uint8)


def _finish(request: ReadRequest, data: memoryview) -> None:
    if request.done is not None:
        request.done(request.into if request.into is not None else _NO_BYTES if request.piece is not None else data)

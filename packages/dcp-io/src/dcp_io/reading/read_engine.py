"""Read engine: reads in parallel, verifies CRCs, and writes directly into destinations."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from dcp_base.progress import find_progress
from dcp_io.archives.crc import crc32, crc_at
from dcp_io.reading.block_reads import with_blocks_apart
from dcp_io.reading.crc_checks import check_archive, check_blocks, check_whole, read_with_crc
from dcp_io.reading.open_files import OpenFile
from dcp_io.reading.read_plan import (
    Check,
    ItemRead,
    ReadSizes,
    SharedRead,
    Step,
    Wanted,
    is_in_place,
    parts_to_read,
    plan_reads,
    want,
)
from dcp_io.requests import ReadRequest, ReadStats, Verify
from dcp_io.stores.store import Store
from dcp_io.workers import MAX_INFLIGHT_BYTES, StopSignal, run_together
from dcp_manifest.index.columns import CRC_BLOCK_MAX_BYTES

# Number of upcoming reads that are announced to the storage, for prefetching.
_READS_AHEAD = 4


def read_items(
    store: Store,
    requests: Sequence[ReadRequest],
    *,
    threads: int = 1,
    verify: Verify = "blocks",
    changed_keys: set[str] | None = None,
    max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
) -> ReadStats:
    """Fill every request's destination, and call its `piece` and `done` with verified bytes, or raise an error.

    Unless `verify` is False or the item has no CRC, `done` is never called for bytes that differ from those written.
    After an error a destination may hold unverified bytes, except with `verify="before"`, which reads everything twice.
    Otherwise no byte of an item is read twice.

    Args:
        store: The checkpoint's folder.
        requests: See `ReadRequest` for the callbacks and their threads.
        threads: Limit of the number of reader threads.
        verify: See `Verify`.
        changed_keys: Gets the key of every request with a destination that may have changed, or with a called `piece`
            or `done`, even before an error.
        max_inflight_bytes: Limit of the memory for buffers of all threads, at least one CRC block (1 MiB), without
            destinations and requests that have neither `into` nor `piece`.

    Raises:
        CheckpointNotFoundError: A file is missing; the message has its name and a key that needs it.
        CorruptCheckpointError: Bytes are damaged, or a file is too short; the message has file, key and offset.
        ValueError: A request does not fit its item, or a limit is not positive.
        BaseException: Any error that a `piece` or `done` raises.

    Ranks: one; not collective.
    """
    if threads < 1 or max_inflight_bytes < 1:
        raise ValueError(f"threads={threads} and max_inflight_bytes={max_inflight_bytes} must be at least 1")
    threads = max(1, min(threads, max_inflight_bytes // CRC_BLOCK_MAX_BYTES))
    sizes = ReadSizes.of(store)
    sizes = replace(sizes, step_bytes=min(sizes.step_bytes, max(max_inflight_bytes // threads, CRC_BLOCK_MAX_BYTES)))
    apart = with_blocks_apart(requests, whole=verify == "full")
    wanted = [want(request, verify, run_gap_bytes=sizes.run_gap_bytes) for request in apart]
    reading = [one for one in wanted if one.start != one.stop]
    bytes_read = 0
    progress = find_progress()
    if progress.wanted:
        progress.expect(sum(one.stop - one.start for one in reading) * (2 if verify == "before" else 1))
    if verify == "before":
        bytes_read += _Batch(store, reading, sizes, progress, rehearse=True).run(threads)
    changed = set() if changed_keys is None else changed_keys
    batch = _Batch(store, reading, sizes, progress, rehearse=False, changed=changed)
    bytes_read += batch.run(threads)
    for one in wanted:
        if one.start == one.stop:
            changed.add(one.request.key)
            _finish(one.request, memoryview(bytearray()))
    return ReadStats(bytes_read, frozenset(batch.unverified))


class _Scratch:
    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def take(self, size: int) -> memoryview:
        if len(self._memory) < size:
            self._memory = _memory(size)
        return self._memory[:size]


class _Batch:
    def __init__(
        self,
        store: Store,
        wanted: Sequence[Wanted],
        sizes: ReadSizes,
        count: Callable[[int], object],
        *,
        rehearse: bool,
        changed: set[str] | None = None,
    ) -> None:
        self._store = store
        self._rehearse = rehearse
        self._count = count
        self._changed = set() if changed is None else changed
        self._lock = threading.Lock()
        self._wanted = wanted
        self._sizes = sizes
        self._open: list[OpenFile] = []
        self._queue = self._reads()
        self._ahead: deque[tuple[OpenFile, Step | SharedRead]] = deque()
        self._bytes = 0
        self.unverified = {one.request.key for one in wanted if one.check is Check.NOTHING}

    def run(self, threads: int) -> int:
        try:
            run_together([self._work] * threads)
        finally:
            for file in self._open:
                file.source.close()
        return self._bytes

    def _reads(self) -> Iterator[tuple[OpenFile, Step | SharedRead]]:
        files: dict[str, list[Wanted]] = {}
        for one in self._wanted:
            files.setdefault(one.request.item.file, []).append(one)
        for name, wanted in files.items():
            file = OpenFile(self._store, name, wanted)
            self._open = [other for other in self._open if other.users] + [file]
            reads = plan_reads(wanted, self._sizes, rehearse=self._rehearse)
            file.users = len(reads)
            for read in reads:
                yield file, read

    def _work(self, stop: StopSignal) -> None:
        scratch = _Scratch()
        while True:
            stop.check()
            task = self._take()
            if task is None:
                return
            file, read = task
            if isinstance(read, Step):
                size = self._step(file, read, scratch)
            else:
                size = self._shared(file, read, scratch, stop)
            file.release()
            with self._lock:
                self._bytes += size
            self._count(size)

    def _take(self) -> tuple[OpenFile, Step | SharedRead] | None:
        with self._lock:
            seen = list(itertools.islice(self._queue, _READS_AHEAD + 1 - len(self._ahead)))
            self._ahead += seen
            task = self._ahead.popleft() if self._ahead else None
        for file, read in seen:
            if isinstance(read, SharedRead):
                file.announce(read.start, read.stop - read.start)
            elif all(one.runs is None for one in read.members):  # a step with runs may skip most of its bytes
                file.announce(read.whole.base + read.start, read.stop - read.start)
        return task

    def _step(self, file: OpenFile, step: Step, scratch: _Scratch) -> int:
        whole = step.whole
        key = whole.members[0].request.key
        direct = is_in_place(step.members, whole, self._rehearse)
        if direct:
            self._changed.add(step.members[0].request.key)
        view = self._hold(whole) if whole.held else None if direct else scratch.take(step.stop - step.start)
        origin = whole.start if whole.held else step.start
        size = 0
        for start, stop in parts_to_read(step, run_gap_bytes=self._sizes.run_gap_bytes):
            if view is None:
                buffers = _around(step.members[0].request, start, stop, scratch)
            else:
                buffers = [view[start - origin : stop - origin]]
            size += stop - start
            if whole.check is Check.BLOCKS:
                before = crc_at(whole.item, start)
                value = read_with_crc(file, whole.base + start, buffers, before, piece_bytes=self._sizes.piece_bytes)
                check_blocks(key, whole.item, start, stop, buffers, value)
            elif whole.check is Check.WHOLE:
                value = read_with_crc(file, whole.base + start, buffers, 0, piece_bytes=self._sizes.piece_bytes)
                with self._lock:
                    whole.crcs[start] = value, stop - start
            else:
                file.source.read_into(whole.base + start, buffers)
        if size and view is not None and not whole.held:
            self._deliver(step.members, view, step.start, step.stop)
        with self._lock:
            whole.steps -= 1
            finished = whole.steps == 0
        if finished:
            self._complete(whole)
        return size

    def _hold(self, whole: ItemRead) -> memoryview:
        with self._lock:
            if whole.memory is None:
                whole.memory = _memory(whole.stop - whole.start)
            return whole.memory

    def _deliver(self, members: Sequence[Wanted], view: memoryview, start: int, stop: int) -> None:
        if self._rehearse:
            return
        for one in members:
            request = one.request
            first, last = max(start, request.start), min(stop, request.stop)
            if first >= last:
                continue
            self._changed.add(request.key)
            data = view[first - start : last - start]
            if request.piece is not None:
                request.piece(first, data)
            elif request.into is not None:
                request.into[first - request.start : last - request.start] = data

    def _complete(self, whole: ItemRead) -> None:
        key, memory = whole.members[0].request.key, whole.memory
        if whole.check is Check.WHOLE:
            check_whole(key, whole.item, whole.crcs)
        elif memory is not None and whole.check is Check.ARCHIVE and not check_archive(key, whole.item, memory):
            with self._lock:
                self.unverified.update(one.request.key for one in whole.members)
        if memory is not None:
            self._deliver(whole.members, memory, whole.start, whole.stop)
            whole.memory = None
        if self._rehearse:
            return
        for one in whole.members:
            request = one.request
            held = None if memory is None else memory[request.start - whole.start : request.stop - whole.start]
            self._changed.add(request.key)
            _finish(request, held)

    def _shared(self, file: OpenFile, read: SharedRead, scratch: _Scratch, stop: StopSignal) -> int:
        buffer = scratch.take(read.stop - read.start)
        file.source.read_into(read.start, [buffer])
        for one in read.members:
            stop.check()
            request = one.request
            origin = one.base - read.start
            data = buffer[origin + one.start : origin + one.stop]
            if one.check is not Check.NOTHING:
                self._check_small(one, data)
            if self._rehearse:
                continue
            self._changed.add(request.key)
            if request.start != one.start or request.stop != one.stop:
                data = data[request.start - one.start : request.stop - one.start]
            if request.into is not None:
                request.into[:] = data
            elif request.piece is not None:
                request.piece(request.start, data)
            if request.done is not None:
                _finish(request, data)
        return read.stop - read.start

    def _check_small(self, one: Wanted, data: memoryview) -> None:
        key, item = one.request.key, one.request.item
        if one.check is Check.ARCHIVE:
            if not check_archive(key, item, data):
                with self._lock:
                    self.unverified.add(key)
        elif len(data) != item.stored_bytes or crc32(data) != item.crc32:
            check_blocks(key, item, one.start, one.stop, [data])


def _finish(request: ReadRequest, data: memoryview | None) -> None:
    if request.done is None:
        return
    if request.into is not None:
        data = request.into
    elif request.piece is not None or data is None:
        data = memoryview(bytearray())
    request.done(data)


def _memory(size: int) -> memoryview:
    return np.empty(size, np.uint8).data


def _around(request: ReadRequest, start: int, stop: int, scratch: _Scratch) -> list[memoryview]:
    into = request.into
    first = min(max(start, request.start), stop)
    last = max(min(stop, request.stop), first)
    before, after = first - start, stop - last
    if into is None or not before + after:
        return [] if into is None else [into[first - request.start : last - request.start]]
    spare = scratch.take(before + after)
    pieces = [spare[:before], into[first - request.start : last - request.start], spare[before:]]
    return [piece for piece in pieces if len(piece)]

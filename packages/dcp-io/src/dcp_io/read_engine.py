"""Reading ranges of stored items: parallel, verified, straight into the destination where that is possible."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from dcp_io.crc import crc32, crc_at
from dcp_io.read_plan import Check, DirectRead, SharedRead, Verify, Wanted, plan_reads, want
from dcp_io.store import Source, Store
from dcp_io.workers import StopSignal, run_together
from dcp_io.zip_check import is_zip, verify_zip
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.items import Framing, StoredItem, block_bytes
from dcp_manifest.requests import ReadRequest, ReadStats

__all__ = ["read_items"]


def read_items(
    store: Store,
    requests: Sequence[ReadRequest],
    *,
    threads: int = 1,
    verify: Verify = "blocks",
    changed_keys: set[str] | None = None,
) -> ReadStats:
    """Fill every request's destination and call its `done` with verified bytes, or raise.

    Unless `verify` is False or the item carries no CRC, `done` never sees bytes that differ from those written. A
    destination may hold unverified bytes when this raises, except with `verify="before"`. Bytes that several
    requests want through buffers are read once.

    Args:
        store: Where the items lie.
        requests: Any number; their `done` may be called in any thread, one after another per request.
        threads: At most so many reader threads, at least 1.
        verify: See `Verify`.
        changed_keys: Gets the key of every request whose destination may have changed or whose `done` was called;
            also when this raises.

    Returns:
        Bytes read, and the keys whose bytes nothing vouches for.

    Raises:
        CheckpointNotFoundError: A file is missing; names it and a key that needs it.
        CorruptCheckpointError: Bytes differ from those written, or a file is too short; names file, key and offset.
        ValueError: A request contradicts its item.
        BaseException: Whatever a `done` raised.

    Ranks: one; not collective.
    """
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    wanted = [want(request, verify) for request in requests]
    empty = [one.request for one in wanted if one.start == one.stop]
    reading = [one for one in wanted if one.start != one.stop]
    bytes_read = 0
    if verify == "before":
        bytes_read += _Batch(store, reading, rehearse=True).run(threads)
    changed = set() if changed_keys is None else changed_keys
    batch = _Batch(store, reading, rehearse=False, changed=changed)
    bytes_read += batch.run(threads)
    for request in empty:
        changed.add(request.key)
        if request.done is not None:
            request.done(memoryview(bytearray()) if request.into is None else request.into)
    return ReadStats(bytes_read, frozenset(batch.unverified))


class _Batch:
    """The reads of one pass over the requests, and what their threads share."""

    def __init__(
        self, store: Store, wanted: Sequence[Wanted], *, rehearse: bool, changed: set[str] | None = None
    ) -> None:
        self._store = store
        self._rehearse = rehearse
        self._changed = set() if changed is None else changed
        self._lock = threading.Lock()
        self._files = plan_reads(wanted, rehearse=rehearse)
        self._left: dict[int, int] = {}
        for _, reads in self._files:
            for read in reads:
                if isinstance(read, DirectRead):
                    self._left[id(read.wanted)] = self._left.get(id(read.wanted), 0) + 1
        self._open: list[_OpenFile] = []
        self._queue = self._reads()
        self._bytes = 0
        self.unverified = {one.request.key for one in wanted if one.check is Check.NOTHING}

    def run(self, threads: int) -> int:
        """Do every read; the number of bytes read."""
        count = sum(len(reads) for _, reads in self._files)
        try:
            if count:
                run_together([self._work] * min(threads, count))
        finally:
            for file in self._open:
                file.close()
        return self._bytes

    def _reads(self) -> Iterator[tuple[_OpenFile, DirectRead | SharedRead]]:
        for name, reads in self._files:
            file = _OpenFile(self._store, name, users=len(reads))
            self._open = [other for other in self._open if other.users] + [file]
            for read in reads:
                yield file, read

    def _work(self, stop: StopSignal) -> None:
        while True:
            stop.check()
            with self._lock:
                task = next(self._queue, None)
            if task is None:
                return
            file, read = task
            size = self._direct(file, read) if isinstance(read, DirectRead) else self._shared(file, read, stop)
            file.release()
            with self._lock:
                self._bytes += size

    def _direct(self, file: _OpenFile, read: DirectRead) -> int:
        one = read.wanted
        request = one.request
        source = file.source(one)
        if self._rehearse or request.into is None:
            buffers = [_memory(read.stop - read.start)]
        else:
            self._changed.add(request.key)
            buffers = _pieces(request, request.into, read.start, read.stop)
        source.read_into(one.base + read.start, buffers)
        if one.check is Check.CRC:
            _check_crc(request.key, request.item, read.start, read.stop, buffers)
        with self._lock:
            self._left[id(one)] -= 1
            finished = self._left[id(one)] == 0
        if finished and not self._rehearse and request.done is not None and request.into is not None:
            request.done(request.into)
        return read.stop - read.start

    def _shared(self, file: _OpenFile, read: SharedRead, stop: StopSignal) -> int:
        for one in read.members:
            source = file.source(one)
        buffer = _memory(read.stop - read.start)
        source.read_into(read.start, [buffer])
        for one in read.members:
            stop.check()
            first = one.base - read.start
            self._check(one, buffer[first + one.start : first + one.stop])
            if not self._rehearse:
                request = one.request
                self._changed.add(request.key)
                data = buffer[first + request.start : first + request.stop]
                if request.into is not None:
                    request.into[:] = data
                    data = request.into
                if request.done is not None:
                    request.done(data)
        return read.stop - read.start

    def _check(self, one: Wanted, data: memoryview) -> None:
        request = one.request
        if one.check is Check.CRC:
            _check_crc(request.key, request.item, one.start, one.stop, [data])
        elif one.check is Check.ARCHIVE:
            verdict = verify_zip(data)
            if verdict is False or (request.item.framing is Framing.TORCH_ZIP and not is_zip(data)):
                raise CorruptCheckpointError(
                    "the stored archive is damaged: its bytes do not match its CRCs; load another checkpoint",
                    file=request.item.file,
                    key=request.key,
                    offset=request.item.offset,
                )
            if verdict is None:
                with self._lock:
                    self.unverified.add(request.key)


class _OpenFile:
    """A file that is opened by its first read and closed after its last, so that few are open at a time."""

    def __init__(self, store: Store, name: str, *, users: int) -> None:
        self._store = store
        self._name = name
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._size = 0
        self.users = users
        """Reads that are still to be done."""

    def release(self) -> None:
        """One read is done."""
        with self._lock:
            self.users -= 1
            if self.users == 0:
                self.close()

    def close(self) -> None:
        """Close the file. Not while a thread reads from it."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def source(self, one: Wanted) -> Source:
        """The open file, once it is known to reach as far as `one` needs: nothing is allocated for less."""
        item = one.request.item
        with self._lock:
            if self._source is None:
                try:
                    self._source = self._store.open(self._name)
                    self._size = self._source.size()
                except CheckpointNotFoundError as error:
                    raise CheckpointNotFoundError(f"{error}; {one.request.key!r} is stored in it") from error
        if one.base + one.stop > self._size:
            raise CorruptCheckpointError(
                f"the file has {self._size} bytes, {one.base + one.stop} are needed: it is truncated or swapped",
                file=self._name,
                key=one.request.key,
                offset=item.offset,
            )
        return self._source


def _memory(size: int) -> memoryview:
    return np.empty(size, np.uint8).data


def _pieces(request: ReadRequest, into: memoryview, start: int, stop: int) -> list[memoryview]:
    """Buffers for [start, stop) of the stored range: the destination where it is wanted, scratch around it."""
    first = min(max(start, request.start), stop)
    last = max(min(stop, request.stop), first)
    pieces = []
    if first > start:
        pieces.append(_memory(first - start))
    if last > first:
        pieces.append(into[first - request.start : last - request.start])
    if stop > last:
        pieces.append(_memory(stop - last))
    return pieces


def _check_crc(key: str, item: StoredItem, start: int, stop: int, buffers: Sequence[memoryview]) -> None:
    """Compare [start, stop) of a stored range, which begins and ends where CRCs are recorded, with those CRCs."""
    value = crc_at(item, start)
    for buffer in buffers:
        value = crc32(buffer, value)
    if value == crc_at(item, stop):
        return
    data = b"".join(buffers)
    block = block_bytes(item.stored_bytes) if item.running_crcs is not None else item.stored_bytes
    bad = start
    for bad in range(start, stop, block):
        end = min(stop, bad + block)
        if crc32(data[bad - start : end - start], crc_at(item, bad)) != crc_at(item, end):
            break
    raise CorruptCheckpointError(
        f"bytes {bad} to {min(stop, bad + block)} of the stored data differ from what was written: the file is "
        "damaged or was swapped; load another checkpoint",
        file=item.file,
        key=key,
        offset=item.offset + item.lead + bad,
    )

"""Verification of a whole checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np

from dcp_base.errors import DcpError
from dcp_base.progress import report_operation
from dcp_io.archives.archive_checks import verify_zip
from dcp_io.archives.crc import RunningCrc, crc32
from dcp_io.archives.zip_format import ALIGNMENT_BYTES, is_zip, tensor_frame
from dcp_io.saves.save_files import MARK_BYTES, mark_bytes, own_name
from dcp_io.stores.local_store import LocalStore
from dcp_io.stores.store import Source, Store
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.file.index_problems import Examined, Problem, examine
from dcp_manifest.folders.folder import is_index_name, rank_index_name
from dcp_manifest.folders.index_choice import choose_index
from dcp_manifest.index.boxes import coverage_problems
from dcp_manifest.index.columns import (
    CheckpointIndex,
    EncodedBlocks,
    Framing,
    ItemKind,
    StoredItem,
    block_bytes,
    needed_bytes,
)
from dcp_manifest.index.stored_tensors import stored_objects, stored_tensors


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of verifying a checkpoint."""

    problems: tuple[Problem, ...]
    """Empty for a sound checkpoint."""
    items: int
    """Items in the index."""
    bytes: int
    """Bytes read."""
    unverified_keys: frozenset[str] = frozenset()
    """Keys of items without a CRC."""

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def verify_checkpoint(
    checkpoint: Store | str | os.PathLike[str],
    *,
    threads: int = 1,
    on_read: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Verify the current checkpoint in a folder: read all of its files, and return all problems as a report.

    The checks cover the index, the coverage of tensors by chunks, every item's CRCs (in checkpoints of stock, the CRCs
    inside the archives), archive frames, gaps, overlaps, the ends of files, and missing files.

    For a URI pass `open_store(uri)`. `threads` files are read at the same time. `on_read` gets the number of bytes
    just read, in one thread at a time. Raises OSError if the storage failed.

    Ranks: one; not collective.
    """
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    store = checkpoint if isinstance(checkpoint, Store) else LocalStore(checkpoint)
    reporting = threading.Lock()
    with report_operation("verify", store.url) as progress:
        times, examined = _examine_indexes(store)
        problems = [one for found in examined.values() for one in found.problems]
        try:
            index = choose_index(times, lambda name: examined[name].decoded())
        except DcpError as error:
            if not problems:
                missing = isinstance(error, CheckpointNotFoundError)
                message = f"there is no checkpoint in {store.url}" if missing else str(error)
                problems.append(Problem(message, file=getattr(error, "file", None)))
            return VerifyReport(tuple(problems), 0, 0)
        progress.expect(sum(needed_bytes(index).values()))

        def report_read(count: int) -> None:
            with reporting:
                progress(count)
                if on_read is not None:
                    on_read(count)

        problems += [Problem(message, key=name) for name, message in coverage_problems(index)]
        of_ranks = [] if index.info is None else _rank_indexes(examined, index.info.save_id)
        files = _items_by_file(of_ranks or [index])
        verify = partial(verify_file, store, exact=index.info is not None, on_read=report_read)
        reports = _verify_files(verify, files, threads)
    for report in reports:
        problems += report.problems
    return VerifyReport(
        problems=tuple(problems),
        items=sum(map(len, files.values())),
        bytes=sum([report.bytes for report in reports]),
        unverified_keys=frozenset().union(*[report.unverified_keys for report in reports]),
    )


def _verify_files(
    verify: Callable[[str, list[IndexedItem]], FileReport], files: dict[str, list[IndexedItem]], threads: int
) -> list[FileReport]:
    names = sorted(files)
    items = [files[name] for name in names]
    if min(threads, len(files)) < 2:  # in the caller's thread, which an interrupt ends at once
        return [*map(verify, names, items)]
    with ThreadPoolExecutor(threads, thread_name_prefix="dcp-io") as pool:
        return [*pool.map(verify, names, items)]


def _examine_indexes(store: Store) -> tuple[dict[str, float], dict[str, Examined]]:
    times: dict[str, float] = {}
    examined: dict[str, Examined] = {}
    for entry in sorted(store.list(), key=attrgetter("name")):
        if is_index_name(entry.name):
            with contextlib.suppress(CheckpointNotFoundError):
                examined[entry.name] = examine(store.read(entry.name), file=entry.name)
                times[entry.name] = entry.mtime
    return times, examined


def _rank_indexes(examined: Mapping[str, Examined], save_id: str) -> list[CheckpointIndex]:
    """The merged index lacks replicas that ranks wrote."""
    found: dict[int, CheckpointIndex] = {}
    for name, one in examined.items():
        if rank_index_name(name) is not None and isinstance(one.index, CheckpointIndex):
            info = one.index.info
            if info is not None and info.save_id == save_id and info.rank is not None:
                found[info.rank] = one.index
    return list(found.values())


def _items_by_file(indexes: list[CheckpointIndex]) -> dict[str, list[IndexedItem]]:
    files: dict[str, list[IndexedItem]] = defaultdict(list)
    for index in indexes:
        for tensor in stored_tensors(index):
            for chunk in tensor.chunks:
                files[chunk.item.file].append(IndexedItem(tensor.name, chunk.item, tensor.dtype, chunk.sizes))
        for name, item in stored_objects(index):
            files[item.file].append(IndexedItem(name, item))
    return files


Span = tuple[int, int, int]
"""Start, stop and CRC32 of a stored range."""


class PassingCrcs:
    """Check of one file: each item's CRC is compared as soon as its last byte has passed.

    `spans` are the file's ranges, from `PassingCrcs.spans_by_file`.
    """

    def __init__(self, name: str, spans: list[Span]) -> None:
        self._name = name
        self._spans = spans
        self._next = 0
        self._crc = 0

    @staticmethod
    def spans_by_file(index: CheckpointIndex) -> dict[str, list[Span]]:
        """Return the stored ranges with a CRC per data file, in file order."""
        spans: dict[str, set[Span]] = defaultdict(set)
        for items in (index.chunk_items, index.object_items):
            if items is None:
                continue
            starts = items.offset + items.lead
            rows = zip(
                items.file.tolist(),
                starts.tolist(),
                (starts + items.stored_bytes).tolist(),
                items.crc32.tolist(),
                items.checked.tolist(),
                strict=True,
            )
            for file, start, stop, crc, checked in rows:
                if checked:
                    spans[index.files[file]].add((start, stop, crc))
        return {name: sorted(found) for name, found in spans.items()}

    def take(self, position: int, piece: memoryview) -> None:
        """Check the next bytes of the file, at the offset `position`.

        Raises CorruptCheckpointError if an item that ends in this piece differs from what was saved.
        """
        end = position + len(piece)
        while self._next < len(self._spans):
            start, stop, wanted = self._spans[self._next]
            if start > end:
                return
            self._crc = crc32(piece[max(start - position, 0) : max(min(stop, end) - position, 0)], self._crc)
            if stop > end:
                return
            if self._crc != wanted:
                raise CorruptCheckpointError(
                    f"bytes {start} to {stop} differ from what was saved; they are not copied",
                    file=self._name,
                    offset=start,
                )
            self._next, self._crc = self._next + 1, 0


_WINDOW_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class IndexedItem:
    """A stored item, as the index describes it."""

    key: str
    item: StoredItem
    dtype: str | None = None
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FileReport:
    """Result of verifying one file."""

    problems: tuple[Problem, ...]
    bytes: int
    unverified_keys: frozenset[str]


def verify_file(
    store: Store, name: str, items: Sequence[IndexedItem], *, exact: bool, on_read: Callable[[int], None]
) -> FileReport:
    """Verify one data file, and every item in it. Raises OSError.

    `exact`: this project wrote it, so gaps are short and zero, and it ends with the last item.
    """
    try:
        source = store.open(name)
        size = source.size()
    except CheckpointNotFoundError as error:
        lost = _keys(items)
        message = f"{error}; {_items(len(items))} lost"
        return FileReport((Problem(message, file=name, key=lost[0], lost_keys=lost),), 0, frozenset())
    except DcpError as error:
        return FileReport((Problem(str(error), file=name),), 0, frozenset())
    try:
        check = _FileCheck(name, _Window(source, size, on_read), exact=exact)
        check.run(items)
        return FileReport(tuple(check.problems), check.window.bytes_read, frozenset(check.unverified))
    finally:
        source.close()


def _keys(items: Sequence[IndexedItem]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.key for one in sorted(items, key=lambda one: one.item.offset)))


def _items(count: int) -> str:
    return f"{count} item{'s are' if count != 1 else ' is'}"


class _Window:
    """Sliding window; only ranges that go back by more than the window are read again."""

    def __init__(self, source: Source, size: int, on_read: Callable[[int], None]) -> None:
        self._source = source
        self._on_read = on_read
        self._start = 0
        self._data = memoryview(b"")
        self.size = size
        self.bytes_read = 0

    def view(self, start: int, stop: int) -> memoryview:
        if not self._start <= start <= stop <= self._start + len(self._data):
            self._move(start, min(self.size, max(stop, start + _WINDOW_BYTES)))
        return self._data[start - self._start : stop - self._start]

    def _move(self, start: int, stop: int) -> None:
        data = np.empty(stop - start, np.uint8).data
        held = self._data[start - self._start :] if self._start <= start else self._data[:0]
        kept = min(len(held), len(data))
        data[:kept] = held[:kept]
        count = len(data) - kept
        if count:
            self._source.read_into(start + kept, [data[kept:]])
        self._start, self._data = start, data
        self.bytes_read += count
        self._on_read(count)


class _FileCheck:
    def __init__(self, name: str, window: _Window, *, exact: bool) -> None:
        self._name = name
        self._exact = exact
        self._linked = False
        self.window = window
        self.problems: list[Problem] = []
        self.unverified: set[str] = set()

    def run(self, items: Sequence[IndexedItem]) -> None:
        position = self._mark_bytes(items)
        last: StoredItem | None = None
        cut = [one for one in items if one.item.offset + one.item.length > self.window.size]
        for one in sorted(items, key=attrgetter("item.offset", "item.length")):
            start, stop = one.item.offset, one.item.offset + one.item.length
            shared = last is not None and (last.offset, last.length) == (start, one.item.length)
            if start < position and not shared:
                self._report("the item overlaps the one before it", one.key, start)
            if stop <= self.window.size:
                if self._exact and not self._linked:
                    self._check_gap(position, start)
                self._check_item(one)
            position, last = max(position, stop), one.item
        if cut:
            self._report_end(cut)
        if self._exact and not self._linked and self.window.size > position:
            self._report(f"{self.window.size - position} bytes follow the last item", None, position)

    def _mark_bytes(self, items: Sequence[IndexedItem]) -> int:
        own = own_name(self._name)
        if not self._exact or own is None or own.save_id is None or self.window.size < MARK_BYTES:
            return 0
        if min([one.item.offset for one in items]) < MARK_BYTES:
            return 0
        mark = self.window.view(0, MARK_BYTES)
        count = mark_bytes(mark)
        # A link may have values that only other saves need.
        self._linked = count > 0 and not bytes(mark).rstrip(b"\0").endswith(own.save_id.encode())
        return count

    def _report(self, message: str, key: str | None, offset: int) -> None:
        self.problems.append(Problem(message, self._name, key, offset))

    def _report_end(self, cut: Sequence[IndexedItem]) -> None:
        size, lost = self.window.size, _keys(cut)
        wanted = max(one.item.offset + one.item.length for one in cut)
        message = f"truncated: the file ends at {size:,} of {wanted:,} bytes; {_items(len(cut))} lost"
        self.problems.append(Problem(message, self._name, lost[0], size, lost))

    def _check_gap(self, start: int, stop: int) -> None:
        if stop - start >= ALIGNMENT_BYTES:
            self._report(f"{stop - start} bytes belong to no item", None, start)
        elif stop > start and any(self.window.view(start, stop)):
            self._report("the gap between two items is not zero", None, start)

    def _check_item(self, one: IndexedItem) -> None:
        item = one.item
        frame = self._frame(one) if self._exact and item.kind is ItemKind.RAW else None
        # Head, data, tail: in the order of the file, so that nothing is read twice.
        if frame is not None and self.window.view(item.offset, item.offset + item.lead) != frame[0]:
            self._report("the archive's head differs from what was written", one.key, item.offset)
        if item.crc32 is not None:
            self._check_crcs(one)
        elif item.kind is ItemKind.ARCHIVE:
            self._check_archive(one)
        else:
            self.unverified.add(one.key)
        if frame is not None:
            end = item.offset + item.length
            start = item.offset + item.lead + item.stored_bytes
            if self.window.view(start, end) != frame[1]:
                self._report("the archive's directory differs from what was written", one.key, start)

    def _check_crcs(self, one: IndexedItem) -> None:
        item = one.item
        start = item.offset + item.lead
        running = RunningCrc(item.stored_bytes)
        stop = start + item.stored_bytes
        for position in range(start, stop, _WINDOW_BYTES):
            running.update(self.window.view(position, min(stop, position + _WINDOW_BYTES)))
        if running.value == item.crc32:
            if item.kind is ItemKind.ARCHIVE and item.framing is Framing.TORCH_ZIP and not self._is_archive(item):
                self._report("the item should be an archive, but its bytes are not", one.key, start)
            return
        bad = 0
        if item.blocks is not None:
            bad = self._first_bad_block(item, item.blocks)
        elif item.running_crcs is not None:
            wrong = np.flatnonzero(running.borders() != item.running_crcs)
            blocks = int(wrong[0]) if len(wrong) else len(item.running_crcs)
            bad = blocks * block_bytes(item.stored_bytes)
        self._report("the stored data differ from what was written", one.key, start + bad)

    def _first_bad_block(self, item: StoredItem, blocks: EncodedBlocks) -> int:
        start = position = item.offset + item.lead
        for length, wanted in zip(blocks.lengths.tolist(), blocks.crcs.tolist(), strict=True):
            if crc32(self.window.view(position, position + length)) != wanted:
                return position - start
            position += length
        return 0

    def _is_archive(self, item: StoredItem) -> bool:
        start = item.offset + item.lead
        return is_zip(self.window.view(start, start + min(item.stored_bytes, 4)))

    def _check_archive(self, one: IndexedItem) -> None:
        item = one.item
        data = self.window.view(item.offset, item.offset + item.length)
        verdict = verify_zip(data)
        if verdict is False or (item.framing is Framing.TORCH_ZIP and not is_zip(data)):
            self._report("the stored archive does not match its own CRCs", one.key, item.offset)
        elif verdict is None:
            self.unverified.add(one.key)

    def _frame(self, one: IndexedItem) -> tuple[bytes, bytes] | None:
        item = one.item
        if not item.lead and item.length == item.stored_bytes:
            return b"", b""
        if one.dtype is None or item.crc32 is None:
            self._report("the item has a frame that cannot be checked", one.key, item.offset)
            return None
        count = math.prod(one.sizes)
        frame = tensor_frame(one.dtype, one.sizes, item.stored_bytes // count if count else 1)
        return frame.prefix, frame.suffix(item.crc32)

"""Verification of one data file against the index: its items, their framing, and the gaps between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_io.archives.archive_checks import is_zip, verify_zip
from dcp_io.archives.crc import RunningCrc, crc32
from dcp_io.archives.tensor_archive import tensor_frame
from dcp_io.saves.own_files import MARK_BYTES, data_mark, own_name
from dcp_io.stores.store import Source, Store
from dcp_io.writing.data_file import ALIGNMENT_BYTES
from dcp_manifest.errors import CheckpointNotFoundError, DcpError
from dcp_manifest.file.index_problems import Problem
from dcp_manifest.index.items import EncodedBlocks, Framing, ItemKind, StoredItem, block_bytes

__all__ = ["FileReport", "IndexedItem", "verify_file"]

_WINDOW_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class IndexedItem:
    """A stored item with its key, and with the dtype and sizes that the index records for a tensor chunk."""

    key: str
    item: StoredItem
    dtype: str | None = None
    """Dtype of a tensor chunk, without `torch.`; None for an object."""
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FileReport:
    """Result of verifying one data file."""

    problems: tuple[Problem, ...]
    bytes: int
    unverified_keys: frozenset[str]


def verify_file(
    store: Store, name: str, items: Sequence[IndexedItem], *, exact: bool, on_read: Callable[[int], None]
) -> FileReport:
    """Verify one data file: read the file, and check every item that the index locates in it.

    Args:
        store: The checkpoint's folder.
        name: Name of the file.
        items: The items in the file, in any order.
        exact: Whether this project wrote the file. If True, gaps must be short and zero, and the file must end with the
            last item.
        on_read: Progress callback: called with the number of bytes just read.

    Returns:
        The problems, none for a sound file; the number of bytes checked; and the keys of items without CRCs.

    Raises:
        OSError: The storage failed.
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
    """Return the keys of items in the order of the file, each once."""
    return tuple(dict.fromkeys(one.key for one in sorted(items, key=lambda one: one.item.offset)))


def _items(count: int) -> str:
    return f"{count} item{'s are' if count != 1 else ' is'}"


class _Window:
    """Sliding window over a file: the part in memory moves forward in large steps.

    Bytes are read once as long as the requested ranges move forward, or back by less than the window.
    """

    def __init__(self, source: Source, size: int, on_read: Callable[[int], None]) -> None:
        self._source = source
        self._on_read = on_read
        self._start = 0
        self._data = memoryview(b"")
        self.size = size
        self.bytes_read = 0

    def view(self, start: int, stop: int) -> memoryview:
        """Return the bytes [start, stop) of the file; the range must be inside it."""
        if not self._start <= start <= stop <= self._start + len(self._data):
            self._move(start, min(self.size, max(stop, start + _WINDOW_BYTES)))
        return self._data[start - self._start : stop - self._start]

    def _move(self, start: int, stop: int) -> None:
        """Move the window to [start, stop); bytes that it holds already are not read again."""
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

    def steps(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes [start, stop) in pieces."""
        while start < stop:
            end = min(stop, start + _WINDOW_BYTES)
            yield self.view(start, end)
            start = end


class _FileCheck:
    """Verification of one file, item by item in the order of their positions."""

    def __init__(self, name: str, window: _Window, *, exact: bool) -> None:
        self._name = name
        self._exact = exact
        self.window = window
        self.problems: list[Problem] = []
        self.unverified: set[str] = set()

    def run(self, items: Sequence[IndexedItem]) -> None:
        """Check every item, the gaps between them, and the end of the file."""
        position = self._mark_bytes(items)
        last: StoredItem | None = None
        cut = [one for one in items if one.item.offset + one.item.length > self.window.size]
        for one in sorted(items, key=lambda one: (one.item.offset, one.item.length)):
            start, stop = one.item.offset, one.item.offset + one.item.length
            shared = last is not None and (last.offset, last.length) == (start, one.item.length)
            if start < position and not shared:
                self._report("the item overlaps the one before it", one.key, start)
            if stop <= self.window.size:
                if self._exact:
                    self._check_gap(position, start)
                self._check_item(one)
            position, last = max(position, stop), one.item
        if cut:
            self._report_end(cut)
        if self._exact and self.window.size > position:
            self._report(f"{self.window.size - position} bytes follow the last item", None, position)

    def _mark_bytes(self, items: Sequence[IndexedItem]) -> int:
        """Return the length of the mark that names the file's save; 0 for files of earlier writers, which have none."""
        own = own_name(self._name)
        if not self._exact or own is None or own.save_id is None or self.window.size < MARK_BYTES:
            return 0
        first = min(one.item.offset for one in items)
        return MARK_BYTES if first >= MARK_BYTES and self.window.view(0, MARK_BYTES) == data_mark(own.save_id) else 0

    def _report(self, message: str, key: str | None, offset: int) -> None:
        self.problems.append(Problem(message, self._name, key, offset))

    def _report_end(self, cut: Sequence[IndexedItem]) -> None:
        """Report the items beyond the end of the file: one problem, since there is one cause."""
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
        for piece in self.window.steps(start, start + item.stored_bytes):
            running.update(piece)
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
        """Return the start of the first encoded block with a wrong CRC; 0 if only the item's CRC is wrong."""
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
        """Return the bytes expected before and after a tensor's data; empty for a raw item, None if unknown."""
        item = one.item
        if not item.lead and item.length == item.stored_bytes:
            return b"", b""
        if one.dtype is None or item.crc32 is None:
            self._report("the item has a frame that cannot be checked", one.key, item.offset)
            return None
        count = math.prod(one.sizes)
        frame = tensor_frame(one.dtype, one.sizes, item.stored_bytes // count if count else 1)
        return frame.prefix, frame.suffix(item.crc32)

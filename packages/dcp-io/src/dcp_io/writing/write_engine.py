"""Write engine of one rank: distributes items over threads and files, frames and checksums them."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, get_args

import numpy as np
import numpy.typing as npt

from dcp_base.progress import find_progress
from dcp_io.archives.crc import RunningCrc, crc32
from dcp_io.archives.zip_format import ALIGNMENT_BYTES, Frame, tensor_frame
from dcp_io.requests import Alike, BlockEncoder, Layout, Payload, PiecewiseData, Writable, check_options
from dcp_io.saves.save_files import MARK_BYTES, data_mark
from dcp_io.stores.store import Sink, Store
from dcp_io.workers import MAX_INFLIGHT_BYTES, StopSignal, run_together
from dcp_io.writing.encoded_data import encode_payload, write_blocks
from dcp_manifest.folders.folder import data_file_name
from dcp_manifest.index.columns import CRC_BLOCK_MIN_BYTES, EncodedBlocks, Framing, ItemColumns, border_count
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.stored_items import StoredItems, block_columns
from dcp_manifest.types import Buffer

# Small pieces are collected up to this size before they are passed to the storage.
PACK_BYTES = 1 << 20
# A large payload is checksummed and written in steps of this size, which fit into the processor's cache.
STEP_BYTES = 4 << 20
_ZEROS: Final = bytes(ALIGNMENT_BYTES)
_RAW = int(Framing.RAW)
_IN_MEMORY = (bytes, bytearray, memoryview)


# With less data per file, another file (and its fsync) costs more than another thread gains.
FILE_MIN_BYTES = 4 << 20
# Least and greatest number of consecutive alike requests that are written as a group.
_MIN_ALIKE, _MAX_ALIKE = 16, 1024
_NO_BORDERS: Final = np.zeros(0, np.uint32)


def write_items(
    store: Store,
    requests: Sequence[Writable],
    *,
    prefix: str,
    save_id: str,
    layout: Layout = "torch",
    threads: int = 1,
    single_file: bool = True,
    sync: bool = True,
    max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
    groups: Sequence[Sequence[int]] = (),
) -> StoredItems:
    """Write all items or none: on return all are stored (durably with `sync`); after an error no file is left.

    Items are balanced by `cost_bytes`, and resolved just before they are written, each once, in any thread. Tensors are
    written without a copy or, if that is impossible, piece by piece. A tensor that changes during the write fails its
    CRC check when it is loaded.

    If there are `groups`, each file gets the requests in the positions of one group instead.

    The folder must exist. File names begin with `prefix`, e.g. `__3_` for rank 3, and contain `save_id`. For the other
    arguments see `StoreBackend`; little data takes fewer threads. Returns the location per item, in the order of
    `requests`.

    Raises:
        ValueError: A payload contradicts its dtype and sizes, or an argument is invalid.
        OSError: A write failed; the message names the file.
        BaseException: Any error of a `resolve`; of several errors, the first.
    """
    check_options(layout=layout, thread_count=threads, max_inflight_bytes=max_inflight_bytes)
    if not requests:
        return StoredItems.of([])
    buckets: Sequence[Sequence[int]] = (
        [range(n, len(groups), threads) for n in range(min(threads, len(groups)))]
        if groups
        else assign_to_threads(requests, threads)
    )
    made: list[str] = []
    progress = find_progress()
    if progress.wanted:
        progress.expect(sum(request.cost_bytes for request in requests))

    def open_file(number: int) -> tuple[str, DataFile]:
        sink = store.create(data_file_name(prefix, number, save_id), sync=sync)
        made.append(sink.name)
        return sink.name, DataFile(
            sink,
            save_id=save_id,
            layout=layout,
            max_piece_bytes=max(1, max_inflight_bytes // len(buckets)),
            count=progress,
        )

    batch = Batch(requests, open_file, single_file=single_file, groups=groups)
    try:
        run_together([functools.partial(batch.write_bucket, n, bucket) for n, bucket in enumerate(buckets)])
        if sync:
            store.sync_folder()
    except BaseException:
        for name in made:
            with contextlib.suppress(OSError):
                store.delete(name)
        raise
    return batch.items()


@dataclass(frozen=True, slots=True)
class _Written:
    name: str
    positions: Sequence[int]
    places: list[int]
    running_crcs: list[npt.NDArray[np.uint32]]
    chains: tuple[tuple[str, ...], ...]
    blocks: dict[int, EncodedBlocks]


def _stored_items(file: _Written) -> StoredItems:
    rows = np.array(file.places, np.int64).reshape(-1, len(get_args(Place)))
    # An empty item may share its offset with the one after it, but it has no bytes that could be encoded.
    blocks = [file.blocks.get(row[0]) if row[1] else None for row in rows.tolist()] if file.blocks else None
    columns = ItemColumns(
        file=np.zeros(len(rows), np.uint32),
        offset=rows[:, 0].astype(np.uint64),
        length=rows[:, 1].astype(np.uint64),
        lead=rows[:, 2].astype(np.uint32),
        stored_bytes=rows[:, 3].astype(np.uint64),
        framing=rows[:, 4].astype(np.uint8),
        chain=rows[:, 6].astype(np.uint8),
        checked=np.ones(len(rows), np.uint8),
        crc32=rows[:, 5].astype(np.uint32),
        running_crcs=np.concatenate([_NO_BORDERS, *file.running_crcs]),
        blocks=block_columns(blocks) if blocks else None,
    )
    return StoredItems(columns, [file.name], file.chains[1:])


@dataclass(slots=True)
class Batch:
    """State shared by the writer threads.

    `open_file` creates the data file with a number, and returns name and writer.
    """

    requests: Sequence[Writable]
    open_file: Callable[[int], tuple[str, DataFile]]
    single_file: bool
    groups: Sequence[Sequence[int]] = ()
    written: list[_Written] = field(init=False, default_factory=list)

    def items(self) -> StoredItems:
        """Return the locations, in order."""
        written = sorted(self.written, key=operator.attrgetter("name"))
        order = np.concatenate([file.positions for file in written]).argsort(kind="stable")
        return StoredItems.joined([*map(_stored_items, written)]).take(order)

    def write_bucket(self, thread: int, bucket: Sequence[int], stop: StopSignal) -> None:
        """Write one thread's items, or the groups with these numbers."""
        if self.groups:
            files = [(number, self.groups[number]) for number in bucket]
        else:
            files = [(thread, bucket)] if self.single_file else [(item, [item]) for item in bucket]
        for number, positions in files:
            stop.check()
            name, file = self.open_file(number)
            places: list[int] = []
            try:
                for alike, requests in _runs([self.requests[position] for position in positions]):
                    if alike is not None:
                        places += file.add_alike(requests[0].key, alike, alike.resolve(requests), len(requests))
                        stop.check()
                        continue
                    for request in requests:
                        places += file.add(request.key, request.resolve())
                        stop.check()
                file.close()
            except BaseException:
                file.abort()
                raise
            self.written.append(_Written(name, positions, places, file.running_crcs, tuple(file.chains), file.blocks))


def _runs(requests: Sequence[Writable]) -> Iterator[tuple[Alike | None, Sequence[Writable]]]:
    start = 0
    for alike, run in itertools.groupby(requests, operator.attrgetter("alike")):
        stop = start + len([*run])
        worth = alike is not None and stop - start >= _MIN_ALIKE
        for first in range(start, stop, _MAX_ALIKE):
            yield alike if worth else None, requests[first : min(stop, first + _MAX_ALIKE)]
        start = stop


def assign_to_threads(requests: Sequence[Writable], threads: int) -> list[list[int]]:
    """Assign the largest requests first, each to the thread with the fewest bytes; returns their positions.

    Those that share an `Alike` and a size stay together.
    """
    total = sum([request.cost_bytes for request in requests])
    count = max(1, min(threads, len(requests), -(-total // FILE_MIN_BYTES)))
    kinds: dict[Alike | None, int] = {}
    by_kind = [kinds.setdefault(request.alike, len(kinds)) for request in requests]
    by_bytes = [-request.cost_bytes for request in requests]
    order = sorted(sorted(range(len(requests)), key=by_kind.__getitem__), key=by_bytes.__getitem__)
    if count == 1:
        return [order]
    buckets: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for position in order:
        load, number = loads[0]
        buckets[number].append(position)
        heapq.heapreplace(loads, (load + requests[position].cost_bytes, number))
    return [bucket for bucket in buckets if bucket]


def by_part(requests: Sequence[Writable], groups: Sequence[Sequence[int]], parts: Sequence[str]) -> list[list[int]]:
    """Split groups of positions, so that none has items of two parts."""
    split: dict[tuple[str, int], list[int]] = {}
    for number, group in enumerate(groups):
        for position in group:
            part = requests[position].key
            while part and part not in parts:
                part = part.rpartition(".")[0]
            split.setdefault((part, number), []).append(position)
    return [*split.values()]


Place = tuple[int, int, int, int, int, int, int]
"""Offset, length, lead, stored_bytes, framing and crc32 of a `StoredItem`, and its chain's number.
The garbage collector does not track tuples of numbers.
"""


class DataFile:
    """Writer of one data file, which begins with the mark of its save.

    Payloads are aligned to 64 bytes (small raw ones to their element size); the gaps are zero. `count` gets numbers of
    payload bytes, before any encoding.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        save_id: str,
        layout: str,
        max_piece_bytes: int,
        count: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._sink = sink
        self._count = count
        self._uncounted = 0
        self._framed = layout == "torch"
        self._max_piece_bytes = max_piece_bytes
        self._pieces: list[Buffer] = [data_mark(save_id)]
        self._position = MARK_BYTES
        self._written = 0
        self.running_crcs: list[npt.NDArray[np.uint32]] = []
        """Running CRCs, in the order of `add`."""
        self.blocks: dict[int, EncodedBlocks] = {}
        """Encoded blocks, by the item's offset."""
        self.chains: dict[tuple[str, ...], int] = {(): 0}
        self._forms: dict[tuple[str | None, tuple[int, ...], int], tuple[Frame | None, int, int]] = {}

    def add(self, key: str, payload: Payload) -> Place:
        """Append one item. Its memory must not change until `close`. Raises ValueError for a wrong length."""
        chain = 0
        if payload.blocks is not None and _size_of(key, payload.data):
            return self._add_blocks(key, payload, payload.blocks)
        if payload.encoders:
            payload, chain = self._encoded(key, payload)
        data, framing = payload.data, payload.framing
        size = len(data) if type(data) is bytes else _size_of(key, data)
        if framing == _RAW and not chain:
            known = self._forms.get((payload.dtype, payload.sizes, size))
            frame, lead, aligned = known if known is not None else self._form(key, payload, size)
        else:
            frame, lead, aligned = None, 0, alignment(framing, size, 1, framed=self._framed)
        gap = -(self._position + lead) % aligned
        if gap:
            self._pieces.append(_ZEROS[:gap])
        offset = self._position + gap
        if frame is not None:
            self._pieces.append(frame.prefix)
        self._position = offset + lead
        if size > CRC_BLOCK_MIN_BYTES:
            value = self._stream(data, size, counted=not chain)
        else:
            small = data if isinstance(data, _IN_MEMORY) else _joined(data, self._max_piece_bytes)
            value = crc32(small)
            self._pieces.append(small)
            self._position += size
            self._uncounted += 0 if chain else size  # encoding has counted what it took
        if frame is not None:
            suffix = frame.suffix(value)
            self._pieces.append(suffix)
            self._position += len(suffix)
        if self._position - self._written >= PACK_BYTES:
            self._flush()
        return offset, self._position - offset, lead, size, int(framing), value, chain

    def add_alike(self, key: str, alike: Alike, data: Buffer, count: int) -> list[int]:
        """Append `count` concatenated raw payloads of one form; returns their places' numbers."""
        nbytes = len(data) // count
        frame, lead, aligned = self._form(key, Payload(b"", Framing.RAW, alike.dtype, alike.sizes), nbytes)
        view = memoryview(data)
        self._uncounted += len(view)
        crcs = np.fromiter((crc32(view[n : n + nbytes]) for n in range(0, len(view), nbytes)), "<u4", count)
        prefix, suffix = (frame.prefix, frame.suffix(0)) if frame else (b"", b"")
        length = lead + nbytes + len(suffix)
        step = -(-length // aligned) * aligned
        rows = np.zeros((count, step), np.uint8)
        rows[:, :length] = np.frombuffer(prefix + bytes(nbytes) + suffix, np.uint8)
        rows[:, lead : lead + nbytes] = np.frombuffer(view, np.uint8).reshape(count, nbytes)
        if frame is not None:
            first = lead + nbytes + len(frame.before_crc)
            for place in (first, first + 4 + len(frame.between_crcs)):
                rows[:, place : place + 4] = crcs.view(np.uint8).reshape(count, 4)
        gap = -(self._position + lead) % aligned
        self._pieces += [_ZEROS[:gap], rows.data.cast("B")[: (count - 1) * step + length]]
        offset = self._position + gap
        self._position = offset + (count - 1) * step + length
        if self._position - self._written >= PACK_BYTES:
            self._flush()
        places = np.empty((count, 7), np.int64)
        places[:] = (0, length, lead, nbytes, _RAW, 0, 0)
        places[:, 0] = offset + step * np.arange(count)
        places[:, 5] = crcs
        numbers: list[int] = places.reshape(-1).tolist()
        return numbers

    def _add_blocks(self, key: str, payload: Payload, encoder: BlockEncoder) -> Place:
        _item_bytes(key, payload, _size_of(key, payload.data))
        gap = -self._position % ALIGNMENT_BYTES
        if gap:
            self._pieces.append(_ZEROS[:gap])
        offset = self._position = self._position + gap
        blocks, value = write_blocks(payload.data, encoder, self._max_piece_bytes, self._append, self._count)
        chain = self.chains.setdefault(encoder.descriptors, len(self.chains))
        self.blocks[offset] = blocks
        size = self._position - offset
        return offset, size, 0, size, _RAW, value, chain

    def _append(self, data: Buffer) -> None:
        self._position += len(data)
        if len(data) > CRC_BLOCK_MIN_BYTES:
            self._flush(data)
        else:
            self._pieces.append(bytes(data))
            if self._position - self._written >= PACK_BYTES:
                self._flush()

    def _form(self, key: str, payload: Payload, size: int) -> tuple[Frame | None, int, int]:
        item_bytes = _item_bytes(key, payload, size)
        frame = tensor_frame(payload.dtype or "", payload.sizes, item_bytes) if self._framed else None
        form = frame, len(frame.prefix) if frame else 0, alignment(Framing.RAW, size, item_bytes, framed=self._framed)
        self._forms[payload.dtype, payload.sizes, size] = form
        return form

    def _encoded(self, key: str, payload: Payload) -> tuple[Payload, int]:
        frame = None
        if payload.framing == _RAW:
            frame, *_ = self._form(key, payload, _size_of(key, payload.data))
        names = tuple(encoder.get_descriptor() for encoder in payload.encoders)
        chain = self.chains.setdefault(names, len(self.chains))
        data = encode_payload(payload.data, frame, payload.encoders, self._max_piece_bytes, self._count)
        return Payload(data, payload.framing if frame is None else Framing.TORCH_ZIP), chain

    def close(self) -> None:
        """Complete the file."""
        self._flush()
        self._sink.close()

    def abort(self) -> None:
        """Remove the file."""
        self._pieces.clear()
        self._sink.abort()

    def _stream(self, data: Buffer | PiecewiseData, size: int, *, counted: bool) -> int:
        running = RunningCrc(size)
        # A read-only buffer tells the sink that its bytes stay until `close`; see `Sink.write`.
        pieces = (
            (memoryview(data).toreadonly(),) if isinstance(data, _IN_MEMORY) else data.pieces(self._max_piece_bytes)
        )
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), STEP_BYTES):
                part = view[start : start + STEP_BYTES]
                running.update(part)
                self._position += len(part)
                self._flush(part)
                if counted:
                    self._count(len(part))
        if len(borders := running.borders()):
            self.running_crcs.append(borders)
        return running.value

    def _flush(self, *more: Buffer) -> None:
        if self._pieces or more:
            small, self._pieces = self._pieces, []
            self._sink.write([b"".join(small), *more] if small else more)
            self._written = self._position
            if self._uncounted:
                self._count(self._uncounted)
                self._uncounted = 0


def alignment(framing: Framing, size: int, item_bytes: int, *, framed: bool) -> int:
    """Return a payload's alignment."""
    if framing is Framing.OBJECT or (size == 0 and not framed):
        return 1
    if framing is Framing.RAW and not framed and size < ALIGNMENT_BYTES:
        # Future packed dtypes may have other sizes, so this is the largest power of two that divides the size.
        return item_bytes & -item_bytes
    return ALIGNMENT_BYTES


def _size_of(key: str, data: Buffer | PiecewiseData) -> int:
    if isinstance(data, memoryview) and (data.ndim != 1 or data.itemsize != 1 or not data.c_contiguous):
        raise ValueError(f"the payload of {key!r} must be one-dimensional contiguous bytes, not {data.format!r} data")
    return len(data) if isinstance(data, _IN_MEMORY) else data.nbytes


def _joined(data: PiecewiseData, max_bytes: int) -> bytes:
    # One copy of each piece: `join` would request all pieces before it copies the first.
    return b"".join([bytes(piece) for piece in data.pieces(max_bytes)])


def _item_bytes(key: str, payload: Payload, size: int) -> int:
    """For an unknown dtype, the length decides."""
    count = math.prod(payload.sizes)
    if not payload.dtype:
        raise ValueError(f"the payload of {key!r} is raw but names no dtype")
    item_bytes = ITEM_BYTES.get(payload.dtype, size // count if count else 1)
    if size != count * item_bytes:
        raise ValueError(
            f"the payload of {key!r} has {size} bytes; {payload.dtype} of sizes {payload.sizes} takes "
            f"{count * item_bytes}"
        )
    return item_bytes


def measure_items(
    requests: Sequence[Writable], *, prefix: str, save_id: str, layout: Layout, threads: int, single_file: bool
) -> StoredItems:
    """Return the result of `write_items`, with meaningless CRCs."""
    if not requests:
        return StoredItems.of([])

    def open_file(number: int) -> tuple[str, DataFile]:
        name = data_file_name(prefix, number, save_id)
        return name, _MeasuredFile(_NoSink(), save_id=save_id, layout=layout, max_piece_bytes=MAX_INFLIGHT_BYTES)

    batch = Batch(requests, open_file, single_file=single_file)
    for number, bucket in enumerate(assign_to_threads(requests, threads)):
        batch.write_bucket(number, bucket, StopSignal())
    return batch.items()


class _NoSink(Sink):
    name = ""

    def write(self, buffers: Sequence[Buffer]) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


class _MeasuredFile(DataFile):
    def _stream(self, data: Buffer | PiecewiseData, size: int, *, counted: bool) -> int:
        del data, counted
        self._position += size
        if borders := border_count(size):
            self.running_crcs.append(np.zeros(borders, np.uint32))
        return 0

"""Stored tensors and objects as bytes on the host; a tensor's are put together from its chunks, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dcp_io.archives.crc import crc32
from dcp_io.reading.read_engine import read_items
from dcp_io.requests import ReadRequest, ReadStats
from dcp_io.stores.store import Store
from dcp_manifest import CorruptCheckpointError, StoredChunk, StoredItem
from dcp_manifest.index.boxes import intersect
from dcp_manifest.index.columns import block_bytes
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.runs import box_runs

# Size of one read: large enough for the storage, small enough for the processor's cache.
_PIECE_BYTES = 4 << 20
Box = tuple[tuple[int, ...], tuple[int, ...]]
Step = tuple[StoredChunk, int, int]
R = TypeVar("R")
# As many as a checkpoint's writer has: each of its threads has one that reads for it.
_READ_AHEAD_THREADS = 2


class StoredReader:
    """Reader of stored values. This one needs no torch: it reads chunks whose stored bytes are values. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(_READ_AHEAD_THREADS, thread_name_prefix="dcp-values")  # starts none yet

    def submit(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """Run a function in a reader thread."""
        return self._pool.submit(function, *arguments)

    def run(self, requests: Sequence[ReadRequest]) -> ReadStats:
        """Read and verify."""
        return read_items(self._store, requests)

    def whole(self, items: Mapping[str, StoredItem]) -> dict[str, memoryview]:
        """Read items whole, as they are stored, with few requests."""
        found = {name: np.empty(item.stored_bytes, np.uint8).data for name, item in items.items()}
        self.run([ReadRequest(name, item, 0, item.stored_bytes, found[name]) for name, item in items.items()])
        return found

    def tensor(self, dtype: str, shape: tuple[int, ...], chunks: Sequence[StoredChunk]) -> ChunkPieces:
        """Return the stream of a tensor's bytes."""
        return ChunkPieces(self, dtype, shape, chunks)

    def item(self, chunk: StoredChunk) -> StoredItem | None:
        """Return the stored item of a chunk; None if the chunk must be decoded whole."""
        return chunk.item

    def read(self, chunk: StoredChunk, start: int, into: memoryview) -> None:
        """Fill `into` with the chunk's decoded bytes from `start` on. Raises CorruptCheckpointError for damage."""
        if len(into):
            self.run([ReadRequest(chunk.name, chunk.item, start, start + len(into), into)])


class ChunkPieces:
    """Stream of a tensor's bytes, read from its chunks; implements `PiecewiseData`."""

    __slots__ = ("_item_bytes", "_reader", "_shape", "chunks", "nbytes")

    def __init__(self, reader: StoredReader, dtype: str, shape: tuple[int, ...], chunks: Sequence[StoredChunk]) -> None:
        if dtype not in ITEM_BYTES:
            name = chunks[0].name if chunks else None
            raise CorruptCheckpointError(f"the dtype {dtype!r} is not known to this version", key=name)
        self._reader = reader
        self._item_bytes = ITEM_BYTES[dtype]
        self._shape = shape
        self.chunks = tuple(chunk for chunk in chunks if math.prod(chunk.sizes))
        self.nbytes: int = math.prod(shape) * self._item_bytes

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes; a piece is valid until the next piece is requested."""
        if not self.nbytes:
            return iter(())
        rows = all(chunk.sizes[1:] == self._shape[1:] and not any(chunk.offsets[1:]) for chunk in self.chunks)
        return self._by_chunks(max_bytes) if rows else self._by_boxes(max_bytes)

    def rows(self, start: int, stop: int) -> memoryview:
        """Return the bytes of rows [start, stop), and read only CRC blocks that contain them."""
        offsets = (start, *(0,) * (len(self._shape) - 1))
        sizes = (stop - start, *self._shape[1:])
        slab = np.empty((*sizes, self._item_bytes), np.uint8)
        if slab.size:
            for chunk in self.chunks:
                self._fill(slab, offsets, sizes, chunk)
        return slab.reshape(-1).data

    def _by_chunks(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield chunks of whole rows; the next piece is read while the caller processes this one."""
        steps = self._steps(max_bytes // 2)
        buffers = [memoryview(bytearray()), memoryview(bytearray())]

        def read(number: int, chunk: StoredChunk, start: int, size: int) -> memoryview:
            if len(buffers[number % 2]) < size:
                buffers[number % 2] = np.empty(size, np.uint8).data
            piece = buffers[number % 2][:size]
            self._reader.read(chunk, start, piece)
            return piece

        check = _WholeCheck()
        step = next(steps)
        if step[2] == self.nbytes:  # a single piece
            piece = read(0, *step)
            check.update(self._reader, step, piece)
            yield piece
            return
        coming = self._reader.submit(read, 0, *step)
        for number, following in enumerate(steps, 1):
            piece, done, step = coming.result(), step, following
            coming = self._reader.submit(read, number, *following)
            check.update(self._reader, done, piece)
            yield piece
        piece = coming.result()
        check.update(self._reader, step, piece)
        yield piece

    def _steps(self, max_bytes: int) -> Iterator[Step]:
        for chunk in sorted(self.chunks, key=lambda chunk: chunk.offsets):
            encoded = chunk.item.blocks
            block = block_bytes(chunk.nbytes) if encoded is None else encoded.block_bytes
            size = max(min(max_bytes, _PIECE_BYTES) // block, 1) * block
            for start in range(0, chunk.nbytes, size):
                yield chunk, start, min(size, chunk.nbytes - start)

    def _by_boxes(self, max_bytes: int) -> Iterator[memoryview]:
        in_parts = self.nbytes > max_bytes // 2
        for chunk in self.chunks:
            item = self._reader.item(chunk)
            if in_parts and item is not None and item.has_one_crc:
                self._check_whole(chunk, max_bytes)
        for offsets, sizes in boxes_of(self._shape, max(1, max_bytes // 2 // self._item_bytes)):
            slab = np.empty((*sizes, self._item_bytes), np.uint8)
            for chunk in self.chunks:
                self._fill(slab, offsets, sizes, chunk)
            yield slab.reshape(-1).data

    def _check_whole(self, chunk: StoredChunk, max_bytes: int) -> None:
        check = _WholeCheck()
        size = min(max(max_bytes, 1), _PIECE_BYTES, chunk.nbytes)
        buffer = np.empty(size, np.uint8).data
        for start in range(0, chunk.nbytes, size):
            length = min(size, chunk.nbytes - start)
            piece = buffer[:length]
            self._reader.read(chunk, start, piece)
            check.update(self._reader, (chunk, start, length), piece)

    def _fill(
        self, slab: npt.NDArray[np.uint8], offsets: tuple[int, ...], sizes: tuple[int, ...], chunk: StoredChunk
    ) -> None:
        shared = intersect((offsets, sizes), (chunk.offsets, chunk.sizes))
        if shared is None:
            return
        first, lengths = shared
        inside = tuple(start - at for start, at in zip(first, chunk.offsets, strict=True))
        # A box of `boxes_of` spans all dimensions after the one that is split: it is one run of the chunk's bytes.
        start = box_runs(chunk.sizes, inside, lengths, self._item_bytes).start
        part = np.empty(math.prod(lengths) * self._item_bytes, np.uint8)
        self._reader.read(chunk, start, part.data)
        place = tuple(
            slice(at - offset, at - offset + n) for at, offset, n in zip(first, offsets, lengths, strict=True)
        )
        slab[place] = part.reshape(*lengths, self._item_bytes)


def boxes_of(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Yield boxes of at most `limit` elements that partition an array in row-major order; no box is empty."""
    for dim in range(len(shape)):
        inner = math.prod(shape[dim + 1 :])
        if inner <= limit or dim == len(shape) - 1:
            step = max(1, limit // inner)
            for outer in np.ndindex(*shape[:dim]):
                for start in range(0, shape[dim], step):
                    behind = shape[dim + 1 :]
                    offsets = (*map(int, outer), start, *(0,) * len(behind))
                    yield offsets, (*(1,) * dim, min(step, shape[dim] - start), *behind)
            return
    yield (), ()


class _WholeCheck:
    """Check of chunks that have one CRC for many blocks."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, reader: StoredReader, step: Step, piece: memoryview) -> None:
        chunk, start, size = step
        item = reader.item(chunk)
        if item is None or not item.has_one_crc:
            return
        self._value = crc32(piece, self._value if start else 0)
        if start + size == chunk.nbytes and self._value != item.crc32:
            raise CorruptCheckpointError(
                "the stored bytes do not match their CRC; restore the file from a copy",
                file=chunk.item.file,
                key=chunk.name,
                offset=chunk.item.offset,
            )

"""Reader of single stored chunks: raw, in a `torch.save` archive, or encoded by transforms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from dcp_core.errors import CorruptCheckpointError
from dcp_core.storage.item_decoder import ItemDecoder, PartialItem
from dcp_core.tensors.kinds import is_wrapper, plain_values
from dcp_core.tensors.tensor_memory import contiguous, tensor_bytes
from dcp_core.transforms import ExtensionRegistry
from dcp_io import ReadRequest, Store
from dcp_io.reading.read_engine import read_items
from dcp_io.recently_used import RecentlyUsed
from dcp_manifest import StoredChunk, StoredItem

R = TypeVar("R")

_SMALL_BYTES = 256 << 10
_BATCH_BYTES = 4 << 20
_KEPT_BATCHES = 4
_KEPT_DECODED = 2
# Boxes of columns need all of their chunks for each box: a chunk evicted between two boxes is decoded again.
_DECODED_BYTES = 64 << 20
# As many as a checkpoint's writer has: each of its threads has one that reads for it.
_READ_AHEAD_THREADS = 2


class ChunkReader:
    """Reader of the decoded bytes of chunks. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._decoder = ItemDecoder(ExtensionRegistry())
        self._lock = threading.Lock()
        self._partial: dict[StoredChunk, PartialItem] = {}
        self._batch_of: dict[StoredChunk, int] = {}
        self._batches: list[list[StoredChunk]] = []
        self._kept: RecentlyUsed[int, dict[StoredChunk, bytes]] = RecentlyUsed(_KEPT_BATCHES)
        self._thrown: set[int] = set()
        self._decoded: RecentlyUsed[StoredChunk, memoryview] = RecentlyUsed(
            _KEPT_DECODED, weigh=len, free_weight=_DECODED_BYTES
        )
        self._pool = ThreadPoolExecutor(_READ_AHEAD_THREADS, thread_name_prefix="dcp-format")  # starts none yet

    def submit(self, function: Callable[..., R], *arguments: Any) -> Future[R]:
        """Run a function in a reader thread."""
        return self._pool.submit(function, *arguments)

    def prepare(self, chunks: Sequence[StoredChunk]) -> None:
        """Read archive directories, and batch small chunks that are neighbours in this order.

        Batches by file would be read whole for a single chunk of a tensor.
        """
        self._decoder.look_into(((chunk.name, chunk.item) for chunk in chunks), partial(read_items, self._store))
        for chunk in chunks:
            found = self._decoder.in_parts(chunk.name, chunk.item, chunk.sizes)
            if found is not None and found.dtype in (None, _dtype_of(chunk)):
                self._partial[chunk] = found
        small = [chunk for chunk in chunks if chunk in self._partial and 0 < chunk.nbytes <= _SMALL_BYTES]
        room = 0
        for chunk in small:
            if chunk.nbytes > room:
                self._batches.append([])
                room = _BATCH_BYTES
            room -= chunk.nbytes
            self._batches[-1].append(chunk)
            self._batch_of[chunk] = len(self._batches) - 1

    def item(self, chunk: StoredChunk) -> StoredItem | None:
        """Return the stored item of a chunk; None if the chunk must be decoded whole."""
        found = self._partial.get(chunk)
        return None if found is None else found.item

    def read(self, chunk: StoredChunk, start: int, into: memoryview) -> None:
        """Fill `into` with the chunk's decoded bytes from `start` on. Raises CorruptCheckpointError for damage."""
        if not len(into):
            return
        if chunk not in self._partial:
            into[:] = self._decode(chunk)[start : start + len(into)]
        elif chunk in self._batch_of:
            into[:] = self._small(chunk)[start : start + len(into)]
        else:
            read_items(self._store, [self._request(chunk, start, start + len(into), into)])

    def _small(self, chunk: StoredChunk) -> bytes:
        """The chunk is read alone after its batch was evicted."""
        number = self._batch_of[chunk]
        with self._lock:
            batch = self._kept.get(number)
            if batch is None and number not in self._thrown:
                batch = self._read_batch(self._batches[number])
                self._thrown.update(self._kept.put(number, batch))
            if batch is not None:
                return batch[chunk]
        return self._read_batch([chunk])[chunk]

    def _request(
        self,
        chunk: StoredChunk,
        start: int,
        stop: int,
        into: memoryview | None,
        done: Callable[[memoryview], None] | None = None,
    ) -> ReadRequest:
        found = self._partial[chunk]
        return ReadRequest(
            chunk.name, found.item, start, stop, into, done, decoder=found.decoder, decoded_bytes=chunk.nbytes
        )

    def _read_batch(self, chunks: Sequence[StoredChunk]) -> dict[StoredChunk, bytes]:
        found: dict[StoredChunk, bytes] = {}

        def keep(chunk: StoredChunk) -> Callable[[memoryview], None]:
            def done(data: memoryview) -> None:
                found[chunk] = bytes(data)

            return done

        read_items(self._store, [self._request(chunk, 0, chunk.nbytes, None, keep(chunk)) for chunk in chunks])
        return found

    def _decode(self, chunk: StoredChunk) -> memoryview:
        with self._lock:
            data = self._decoded.get(chunk)
            if data is None:
                data = self._decode_now(chunk)
                self._decoded.put(chunk, data)
            return data

    def _decode_now(self, chunk: StoredChunk) -> memoryview:
        item, found = chunk.item, list[memoryview]()

        def done(data: memoryview) -> None:
            dtype = _dtype_of(chunk)
            tensor = self._decoder.tensor(chunk.name, item, data, dtype, chunk.sizes)
            if is_wrapper(tensor):  # files of other formats hold its values
                tensor = plain_values(chunk.name, tensor)
            if tensor.is_quantized or tensor.dtype is not (dtype or torch.uint8):
                raise _damage(chunk, f"it is no tensor of dtype {chunk.dtype}")
            found.append(tensor_bytes(contiguous(tensor.resolve_conj().resolve_neg())))

        read_items(self._store, [ReadRequest(chunk.name, item, 0, item.stored_bytes, None, done)])
        if len(found[0]) != chunk.nbytes:
            raise _damage(chunk, f"it holds {len(found[0])} bytes of values, not {chunk.nbytes}")
        return found[0]


def _dtype_of(chunk: StoredChunk) -> torch.dtype | None:
    return getattr(torch, chunk.dtype, None)


def _damage(chunk: StoredChunk, what: str) -> CorruptCheckpointError:
    item = chunk.item
    return CorruptCheckpointError(
        f"the stored chunk is damaged: {what}", file=item.file, key=chunk.name, offset=item.offset
    )

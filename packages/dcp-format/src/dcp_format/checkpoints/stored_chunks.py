"""Reader of single stored chunks: raw, in a `torch.save` archive, or encoded by transforms."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from dcp_core.errors import CorruptCheckpointError
from dcp_core.storage.item_decoder import ItemDecoder, PartialItem
from dcp_core.tensors.kinds import is_wrapper, plain_values
from dcp_core.tensors.tensor_memory import contiguous, tensor_bytes
from dcp_core.transforms import ExtensionRegistry
from dcp_io import ReadRequest, Store
from dcp_io.reading.stored_reader import StoredReader
from dcp_io.recently_used import RecentlyUsed
from dcp_manifest import StoredChunk, StoredItem

_SMALL_BYTES = 256 << 10
_BATCH_BYTES = 4 << 20
_KEPT_BATCHES = 4
_KEPT_DECODED = 2
# Boxes of columns need all of their chunks for each box: a chunk evicted between two boxes is decoded again.
_DECODED_BYTES = 64 << 20


class DecodingReader(StoredReader):
    """Reader of chunks of all kinds. Thread-safe."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._decoder = ItemDecoder(ExtensionRegistry())
        self._lock = threading.Lock()
        self._partial: dict[StoredChunk, PartialItem] = {}
        self._batch_of: dict[StoredChunk, int] = {}
        self._batches: list[list[StoredChunk]] = []
        self._kept: RecentlyUsed[int, dict[StoredChunk, memoryview]] = RecentlyUsed(_KEPT_BATCHES)
        self._thrown: set[int] = set()
        self._decoded: RecentlyUsed[StoredChunk, memoryview] = RecentlyUsed(
            _KEPT_DECODED, weigh=len, free_weight=_DECODED_BYTES
        )

    def prepare(self, chunks: Sequence[StoredChunk]) -> None:
        """Read archive directories, and batch small chunks that are neighbours in this order.

        Batches by file would be read whole for a single chunk of a tensor.
        """
        self._decoder.look_into(((chunk.name, chunk.item) for chunk in chunks), self.run)
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
        """See `StoredReader`."""
        found = self._partial.get(chunk)
        return None if found is None else found.item

    def read(self, chunk: StoredChunk, start: int, into: memoryview) -> None:
        """See `StoredReader`."""
        if not len(into):
            return
        if chunk not in self._partial:
            into[:] = self._decode(chunk)[start : start + len(into)]
        elif chunk in self._batch_of:
            into[:] = self._small(chunk)[start : start + len(into)]
        else:
            self.run([self._request(chunk, start, into)])

    def _small(self, chunk: StoredChunk) -> memoryview:
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

    def _request(self, chunk: StoredChunk, start: int, into: memoryview) -> ReadRequest:
        found = self._partial[chunk]
        return ReadRequest(
            chunk.name, found.item, start, start + len(into), into, decoder=found.decoder, decoded_bytes=chunk.nbytes
        )

    def _read_batch(self, chunks: Sequence[StoredChunk]) -> dict[StoredChunk, memoryview]:
        found = {chunk: np.empty(chunk.nbytes, np.uint8).data for chunk in chunks}
        self.run([self._request(chunk, 0, into) for chunk, into in found.items()])
        return found

    def _decode(self, chunk: StoredChunk) -> memoryview:
        with self._lock:
            data = self._decoded.get(chunk)
            if data is None:
                data = self._decode_now(chunk)
                self._decoded.put(chunk, data)
            return data

    def _decode_now(self, chunk: StoredChunk) -> memoryview:
        dtype, data = _dtype_of(chunk), self.whole({chunk.name: chunk.item})[chunk.name]
        tensor = self._decoder.tensor(chunk.name, chunk.item, data, dtype, chunk.sizes)
        if is_wrapper(tensor):  # files of other formats hold its values
            tensor = plain_values(chunk.name, tensor)
        if tensor.is_quantized or tensor.dtype is not (dtype or torch.uint8):
            raise _damage(chunk, f"it is no tensor of dtype {chunk.dtype}")
        values = tensor_bytes(contiguous(tensor.resolve_conj().resolve_neg()))
        if len(values) != chunk.nbytes:
            raise _damage(chunk, f"it holds {len(values)} bytes of values, not {chunk.nbytes}")
        return values

    def object(self, name: str, item: StoredItem) -> bytes:
        """Return a stored object."""
        return bytes(self._decoder.object(name, item, self.whole({name: item})[name]))


def _dtype_of(chunk: StoredChunk) -> torch.dtype | None:
    return getattr(torch, chunk.dtype, None)


def _damage(chunk: StoredChunk, what: str) -> CorruptCheckpointError:
    item = chunk.item
    return CorruptCheckpointError(
        f"the stored chunk is damaged: {what}", file=item.file, key=chunk.name, offset=item.offset
    )

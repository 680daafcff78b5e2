"""Chunks are read and decoded about once, however a tensor is put together from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from dcp_format.checkpoints import stored_chunks
from dcp_format.checkpoints.stored_chunks import DecodingReader
from dcp_io import LocalStore, ReadRequest
from dcp_io.reading import stored_reader
from dcp_io.reading.stored_reader import ChunkPieces
from dcp_manifest import StoredChunk, StoredItem
from dcp_manifest.index.columns import Framing

RANKS, TENSORS, CHUNK_BYTES = 6, 320, 16 << 10


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that were read, by file."""
    found: Counter[str] = Counter()
    real = stored_reader.read_items

    def counting(store: LocalStore, requests: Iterable[ReadRequest]) -> None:
        requests = [*requests]
        for request in requests:
            found[request.item.file] += request.stop - request.start
        real(store, requests)

    monkeypatch.setattr(stored_reader, "read_items", counting)
    return found


def of_ranks(folder: Path) -> list[ChunkPieces]:
    """Tensors of which each of six ranks holds a small part, in a file of its own."""
    for rank in range(RANKS):
        (folder / f"{rank}").write_bytes(bytes([rank]) * (TENSORS * CHUNK_BYTES))
    reader = DecodingReader(LocalStore(folder))
    chunks = [[small(f"t{number}", rank, number) for rank in range(RANKS)] for number in range(TENSORS)]
    reader.prepare([chunk for of_tensor in chunks for chunk in of_tensor])
    return [ChunkPieces(reader, "uint8", (RANKS * CHUNK_BYTES,), of_tensor) for of_tensor in chunks]


def small(name: str, rank: int, number: int) -> StoredChunk:
    item = StoredItem(f"{rank}", number * CHUNK_BYTES, CHUNK_BYTES, 0, CHUNK_BYTES, Framing.RAW)
    return StoredChunk(name, "uint8", (rank * CHUNK_BYTES,), (CHUNK_BYTES,), item)


def values(pieces: ChunkPieces) -> bytes:
    return b"".join(map(bytes, pieces.pieces(16 << 20)))


def test_a_few_tensors_of_many_ranks_read_little_more_than_their_bytes(
    tmp_path: Path, read_bytes: Counter[str]
) -> None:
    expected = b"".join(bytes([rank]) * CHUNK_BYTES for rank in range(RANKS))
    tensors = of_ranks(tmp_path)
    assert all(values(pieces) == expected for pieces in tensors[:20])
    assert read_bytes.total() <= stored_chunks._BATCH_BYTES


def test_all_tensors_read_their_bytes_once(tmp_path: Path, read_bytes: Counter[str]) -> None:
    for pieces in of_ranks(tmp_path):
        values(pieces)
    assert read_bytes.total() == RANKS * TENSORS * CHUNK_BYTES


def test_any_order_reads_bytes_twice_at_most(tmp_path: Path, read_bytes: Counter[str]) -> None:
    tensors = of_ranks(tmp_path)
    for number in range(TENSORS):
        values(tensors[number * 177 % TENSORS])
    assert read_bytes.total() <= 2 * RANKS * TENSORS * CHUNK_BYTES


@pytest.mark.parametrize(("kept_bytes", "decodes"), [(64 << 20, 8), (0, 64)])
def test_columns_are_decoded_once_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int, decodes: int
) -> None:
    monkeypatch.setattr(stored_chunks, "_DECODED_BYTES", kept_bytes)
    whole = np.arange(1 << 20, dtype=np.uint32).reshape(1024, 1024)
    chunks = [
        StoredChunk("t", "uint32", (0, 128 * n), (1024, 128), StoredItem("f", 0, 9, 0, 9, Framing.OBJECT))
        for n in range(8)
    ]
    decoded: Counter[StoredChunk] = Counter()

    def decode(self: DecodingReader, chunk: StoredChunk) -> memoryview:
        decoded[chunk] += 1
        columns = whole[:, chunk.offsets[1] : chunk.offsets[1] + chunk.sizes[1]]
        return memoryview(columns.tobytes())

    monkeypatch.setattr(DecodingReader, "_decode_now", decode)
    pieces = ChunkPieces(DecodingReader(LocalStore(tmp_path)), "uint32", whole.shape, chunks)
    assert b"".join(map(bytes, pieces.pieces(1 << 20))) == whole.tobytes()
    assert decoded.total() == decodes

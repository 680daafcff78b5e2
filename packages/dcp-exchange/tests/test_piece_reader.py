"""Reading pieces: bytes, counts, and errors that name file and key."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcp_exchange.piece_queue import PieceReader
from dcp_io import LocalStore, ReadRequest, StoreBackend, crc32
from dcp_io.reading.delivery import Delivery
from dcp_manifest import CheckpointNotFoundError, CorruptCheckpointError, StoredItem
from dcp_manifest.index.columns import Framing

DATA = bytes(range(256)) * 16


def make(store: LocalStore, file: str = "file") -> PieceReader:
    item = StoredItem(file, 0, len(DATA), 0, len(DATA), Framing.RAW, crc32(DATA), None)
    request = ReadRequest("model.weight", item, 0, len(DATA), memoryview(bytearray(len(DATA))))
    return PieceReader(StoreBackend(store), Delivery([request]))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(tmp_path)
    for name in ("file", "other"):
        made.publish(name, DATA if name == "file" else DATA[::-1])
    return made


def test_pieces_are_read_in_threads_and_counted(store: LocalStore) -> None:
    reader = make(store)
    before = len(os.listdir("/proc/self/fd"))

    def read(number: int) -> bool:
        name, wanted = ("file", DATA) if number % 3 else ("other", DATA[::-1])
        buffer = bytearray(100)
        reader.read(name, number, memoryview(buffer))
        return bytes(buffer) == wanted[number : number + 100]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(200)))
    assert reader.bytes_read == 20_000
    assert len(os.listdir("/proc/self/fd")) <= before + 4, "each thread has one file open"
    reader.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_missing_file_is_named_with_the_key(tmp_path: Path) -> None:
    reader = make(LocalStore(tmp_path), "absent")
    with pytest.raises(CheckpointNotFoundError, match=r"absent.*; 'model\.weight' is stored in it"):
        reader.read("absent", 0, memoryview(bytearray(9)))
    assert reader.bytes_read == 0


def test_a_short_file_is_named_with_the_key(store: LocalStore) -> None:
    os.truncate(Path(store.path) / "file", 100)
    reader = make(store)
    with pytest.raises(CorruptCheckpointError, match=r"file.*; 'model\.weight' is stored in it") as caught:
        reader.read("file", 90, memoryview(bytearray(20)))
    assert caught.value.file == "file"
    reader.close()


def test_bytes_of_no_request_are_named_without_a_key(tmp_path: Path) -> None:
    reader = make(LocalStore(tmp_path))
    with pytest.raises(CheckpointNotFoundError) as caught:
        reader.read("absent", 0, memoryview(bytearray(9)))
    assert "stored in it" not in str(caught.value)

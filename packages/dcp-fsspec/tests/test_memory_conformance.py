"""Store and storage pass the suites over `memory://`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dcp_core.testing.conformance import StorageConformance
from dcp_fsspec import FsspecReader, FsspecWriter
from dcp_fsspec.opening import open_store
from dcp_fsspec.store import FsspecStore
from dcp_io.testing import FoldersConformance, StoreConformance

_numbers = itertools.count()


class RawFiles:
    """Raw access to a folder, without the store."""

    def __init__(self, folder: str) -> None:
        self._fs, self._folder = fsspec.url_to_fs(folder)

    def names(self) -> list[str]:
        found = self._fs.find(self._folder) if self._fs.exists(self._folder) else []
        return [path[len(self._folder) + 1 :] for path in found]

    def get(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(f"{self._folder}/{name}"))

    def put(self, name: str, data: bytes) -> None:
        self._fs.makedirs(f"{self._folder}/{name}".rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(f"{self._folder}/{name}", data)

    def delete(self, name: str) -> None:
        self._fs.rm_file(f"{self._folder}/{name}")


class TestMemoryStore(StoreConformance, FoldersConformance):
    @pytest.fixture
    def place(self) -> str:
        return f"memory://stores/{next(_numbers)}"

    def open_store(self, place: Any, folder: str) -> FsspecStore:
        return open_store(f"{place}/{folder}")

    def open_raw(self, place: Any, folder: str) -> RawFiles:
        return RawFiles(f"{place}/{folder}")


class TestLocalStore(TestMemoryStore):
    @pytest.fixture
    def place(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}"


class TestMemoryStorage(StorageConformance):
    """Runs on one rank only, since other processes have another memory."""

    @pytest.fixture
    def ranks(self) -> Any:
        pytest.skip("memory:// is one process's own")

    @pytest.fixture
    def checkpoint_id(self) -> str:
        return f"memory://storages/{next(_numbers)}/checkpoint"

    @pytest.fixture
    def raw(self, checkpoint_id: str) -> RawFiles:
        return RawFiles(checkpoint_id)

    def make_writer(self, checkpoint_id: str) -> FsspecWriter:
        return FsspecWriter(checkpoint_id)

    def make_reader(self, checkpoint_id: str) -> FsspecReader:
        return FsspecReader(checkpoint_id)

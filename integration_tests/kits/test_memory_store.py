"""The store in memory, on which other packages test, passes the suite as well."""

from __future__ import annotations

import pytest

from dcp_io.testing import FoldersConformance, StoreConformance
from integration_tests.kits.memory_store import OBJECTS, MemoryStore


class MemoryFolder:
    def __init__(self, folder: str) -> None:
        self.start = f"{folder}/"

    def names(self) -> list[str]:
        return sorted(path.removeprefix(self.start) for path in OBJECTS if path.startswith(self.start))

    def get(self, name: str) -> bytes:
        return OBJECTS[self.start + name]

    def put(self, name: str, data: bytes) -> None:
        OBJECTS[self.start + name] = data

    def delete(self, name: str) -> None:
        del OBJECTS[self.start + name]


class TestMemoryStore(StoreConformance, FoldersConformance):
    @pytest.fixture
    def place(self, tmp_path):
        return tmp_path

    def open_store(self, place, folder):
        return MemoryStore(f"{place}/{folder}")

    def open_raw(self, place, folder):
        return MemoryFolder(f"{place}/{folder}")

"""`LocalStore` passes the suite that third parties run against their stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_io import LocalStore
from dcp_io.testing import FoldersConformance, RangesConformance, StoreConformance
from integration_tests.kits.shelves import ShelfStore


class LocalFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file())

    def get(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_bytes(data)

    def delete(self, name: str) -> None:
        (self.path / name).unlink()


class TestLocalStore(StoreConformance, FoldersConformance, RangesConformance):
    @pytest.fixture
    def place(self, tmp_path):
        return tmp_path

    def open_store(self, place, folder):
        return LocalStore(place / folder)

    def open_raw(self, place, folder):
        return LocalFolder(place / folder)


class TestShelfStore(StoreConformance, FoldersConformance):
    @pytest.fixture
    def place(self, tmp_path, monkeypatch):
        monkeypatch.setenv("DCP_SHELF_DIR", str(tmp_path))
        return tmp_path

    def open_store(self, place, folder):
        return ShelfStore(folder)

    def open_raw(self, place, folder):
        return LocalFolder(place / folder)

"""The store passes the suite of `dcp_io` over a container in memory, with parts so small that all uploads have many."""

from __future__ import annotations

from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from dcp_io.testing import FoldersConformance, StoreConformance
from dcp_object.address import Address
from dcp_object.client import Client
from dcp_object.store import ObjectStore

ROOT = "s3://in-memory"


class RawObjects:
    """Raw access to a folder, without the store."""

    def __init__(self, native: MemoryStore, folder: str) -> None:
        self._native = native
        self._folder = folder

    def names(self) -> list[str]:
        found = [meta["path"] for chunk in obstore.list(self._native, self._folder) for meta in chunk]
        return [path[len(self._folder) + 1 :] for path in found]

    def get(self, name: str) -> bytes:
        return bytes(obstore.get(self._native, f"{self._folder}/{name}").bytes())

    def put(self, name: str, data: bytes) -> None:
        obstore.put(self._native, f"{self._folder}/{name}", data)

    def delete(self, name: str) -> None:
        obstore.delete(self._native, f"{self._folder}/{name}")


class TestInMemory(StoreConformance, FoldersConformance):
    @pytest.fixture
    def place(self) -> MemoryStore:
        return MemoryStore()

    def open_store(self, place: Any, folder: str) -> ObjectStore:
        return ObjectStore(
            Client(place, ROOT, retry_timeout_seconds=10), Address(ROOT, folder), part_bytes=10_000, uploads=2
        )

    def open_raw(self, place: Any, folder: str) -> RawObjects:
        return RawObjects(place, folder)

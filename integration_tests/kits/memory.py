"""Storages in memory for tests; not durable, and not shared by processes."""

from __future__ import annotations

from dcp_core.records.protocols import CheckpointId
from dcp_core.storage.storage_reader import ByteStorageReader
from dcp_core.storage.storage_writer import ByteStorageWriter
from dcp_io import StoreBackend
from integration_tests.kits.memory_store import MemoryStore

__all__ = ["MemoryReader", "MemoryWriter", "files_in"]


def files_in(folder: str) -> dict[str, bytes]:
    """Return file name → bytes in a directory in memory."""
    store = MemoryStore(folder)
    return {entry.name: store.read(entry.name) for entry in store.list()}


class MemoryWriter(ByteStorageWriter):
    """Storage writer to a directory in memory."""

    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        return StoreBackend(MemoryStore(str(checkpoint_id)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return bool(str(checkpoint_id))


class MemoryReader(ByteStorageReader):
    """Storage reader from a directory in memory."""

    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        return StoreBackend(MemoryStore(str(checkpoint_id)))

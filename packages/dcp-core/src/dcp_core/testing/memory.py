"""Storages in memory, for tests of planners and of `save` and `load` without files.

Checkpoints in memory are not durable, and ranks in different processes do not share them.
"""

from __future__ import annotations

from dcp_core.records.protocols import CheckpointId
from dcp_core.storage.storage_reader import ByteStorageReader
from dcp_core.storage.storage_writer import ByteStorageWriter
from dcp_core.testing.memory_store import MemoryStore
from dcp_io import StoreBackend

__all__ = ["MemoryReader", "MemoryWriter", "files_in"]


def files_in(folder: str) -> dict[str, bytes]:
    """Return the files in a folder in memory: file name → bytes."""
    store = MemoryStore(folder)
    return {entry.name: store.read(entry.name) for entry in store.list()}


class MemoryWriter(ByteStorageWriter):
    """Storage writer that saves to a folder in memory."""

    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        return StoreBackend(MemoryStore(str(checkpoint_id)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return True, because every checkpoint id is valid for this storage."""
        return bool(str(checkpoint_id))


class MemoryReader(ByteStorageReader):
    """Storage reader that loads from a folder in memory."""

    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        return StoreBackend(MemoryStore(str(checkpoint_id)))

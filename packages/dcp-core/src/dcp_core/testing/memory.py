"""Storages in memory: what the tests of planners and of `save`/`load` run on, without any files.

Not for users: nothing is durable, and ranks of different processes do not see each other's folders.
"""

from __future__ import annotations

from dcp_core.records.protocols import CheckpointId
from dcp_core.storage.storage_reader import ByteStorageReader
from dcp_core.storage.storage_writer import ByteStorageWriter
from dcp_core.testing.memory_store import MemoryStore
from dcp_io import StoreBackend

__all__ = ["MemoryReader", "MemoryWriter", "files_in"]


def files_in(folder: str) -> dict[str, bytes]:
    """Name → bytes of what a folder in memory holds."""
    store = MemoryStore(folder)
    return {entry.name: store.read(entry.name) for entry in store.list()}


class MemoryWriter(ByteStorageWriter):
    """Saves to a folder in memory."""

    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        return StoreBackend(MemoryStore(str(checkpoint_id)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Any id will do."""
        return bool(str(checkpoint_id))


class MemoryReader(ByteStorageReader):
    """Loads from a folder in memory."""

    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        return StoreBackend(MemoryStore(str(checkpoint_id)))

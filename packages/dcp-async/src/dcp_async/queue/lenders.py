"""`lender_for`: finds out whether the storage of a save lends memory, in which the state dict is then staged."""

from __future__ import annotations

from dcp_core import DcpError, StorageWriter
from dcp_core.toolkit import CheckpointId, WriterAbilities, abilities
from dcp_io import MemoryLender, open_store, scheme_of

__all__ = ["lender_for"]


def lender_for(checkpoint_id: CheckpointId | None, storage_writer: StorageWriter | None = None) -> MemoryLender | None:
    """Return the lender of the memory of the storage that a save goes to; None for memory of the saver's own.

    Errors of a storage that cannot be opened are left to the save, which names them.

    Args:
        checkpoint_id: Checkpoint id of the save; None for the storage writer's own.
        storage_writer: Storage writer of the save; None for that of the checkpoint id's scheme.
    """
    try:
        if storage_writer is not None:
            lender = abilities(storage_writer, WriterAbilities).lender
            return None if lender is None else lender()
        if checkpoint_id is None or scheme_of(checkpoint_id) == "file":
            return None
        return open_store(checkpoint_id).lender()
    except (DcpError, OSError, ValueError):
        return None

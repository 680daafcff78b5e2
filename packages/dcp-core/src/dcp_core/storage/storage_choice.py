"""Choice of the reader or writer for a checkpoint id: by its URI scheme, among the plugins."""

from __future__ import annotations

import os
from typing import Any

from dcp_core import plugins
from dcp_core.errors import NoCheckpointIdError
from dcp_core.records.protocols import CheckpointId, StorageReader, StorageWriter

__all__ = ["resolve_reader", "resolve_writer"]


def resolve_writer(storage_writer: StorageWriter | None, checkpoint_id: CheckpointId | None) -> StorageWriter:
    """Return the given writer, reset to `checkpoint_id` if there is one; else a new one for the id.

    Raises:
        NoCheckpointIdError: Neither is given, or the id is empty.
        PluginNotFoundError: No installed package handles ids of that scheme; names the package to install.
    """
    return _resolve(storage_writer, checkpoint_id, "writer")  # type: ignore[no-any-return]


def resolve_reader(storage_reader: StorageReader | None, checkpoint_id: CheckpointId | None) -> StorageReader:
    """Return the given reader, reset to `checkpoint_id` if there is one; else a new one. Raises as above."""
    return _resolve(storage_reader, checkpoint_id, "reader")  # type: ignore[no-any-return]


def _resolve(storage: Any, checkpoint_id: CheckpointId | None, role: str) -> Any:
    if storage is not None:
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        return storage
    if checkpoint_id is None or checkpoint_id == "":
        raise NoCheckpointIdError(f"pass a checkpoint_id or a storage_{role}: there is nowhere to go to")
    backend = plugins.storage_for(os.fspath(checkpoint_id))
    factory = backend.load_writer() if role == "writer" else backend.load_reader()
    return factory(checkpoint_id)

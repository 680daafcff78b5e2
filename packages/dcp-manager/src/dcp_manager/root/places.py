"""Storages of checkpoint ids: the writer and reader for one, with the caller's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dcp_core import StorageReader, StorageWriter, plugins

__all__ = ["Places"]


class Places:
    """Makes writers and readers of checkpoint ids.

    Args:
        writer: Function that makes the writer for a checkpoint id; None uses the writer of the id's scheme.
        reader: Function that makes the reader for a checkpoint id; None uses the reader of the id's scheme.
        storage_options: Options for the writers and readers of the scheme.
    """

    def __init__(
        self,
        writer: Callable[[str], StorageWriter] | None,
        reader: Callable[[str], StorageReader] | None,
        storage_options: Mapping[str, Any],
    ) -> None:
        self._writer = writer or (partial(_made, "load_writer", storage_options) if storage_options else None)
        self._reader = reader or (partial(_made, "load_reader", storage_options) if storage_options else None)

    def to_write(self, checkpoint_id: str) -> dict[str, Any]:
        """Return the storage to save to, as arguments of `dcp_core.save`."""
        if self._writer is None:
            return {"checkpoint_id": checkpoint_id}
        return {"storage_writer": self._writer(checkpoint_id)}

    def to_read(self, checkpoint_id: str) -> dict[str, Any]:
        """Return the storage to load from, as arguments of `dcp_core.load`."""
        if self._reader is None:
            return {"checkpoint_id": checkpoint_id}
        return {"storage_reader": self._reader(checkpoint_id)}


def _made(role: str, options: Mapping[str, Any], checkpoint_id: str) -> Any:
    return getattr(plugins.storage_for(checkpoint_id), role)()(checkpoint_id, storage_options=options)

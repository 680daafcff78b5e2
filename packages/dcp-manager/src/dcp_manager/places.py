"""Storages of checkpoint ids: makes the storage writer and reader for a checkpoint id, with the caller's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dcp_core import StorageReader, StorageWriter, plugins

__all__ = ["Places"]


class Places:
    """Factory of storage writers and readers for checkpoint ids.

    Args:
        writer: Function that makes the storage writer for a checkpoint id; None uses the writer of the id's scheme.
        reader: Function that makes the storage reader for a checkpoint id; None uses the reader of the id's scheme.
        storage_options: Options of the storage, for the writers and readers of the id's scheme.
    """

    def __init__(
        self,
        writer: Callable[[str], StorageWriter] | None,
        reader: Callable[[str], StorageReader] | None,
        storage_options: Mapping[str, Any],
    ) -> None:
        if storage_options:
            writer = writer or partial(plugins.open_writer, storage_options=storage_options)
            reader = reader or partial(plugins.open_reader, storage_options=storage_options)
        self._writer, self._reader = writer, reader

    def to_write(self, checkpoint_id: str) -> dict[str, Any]:
        """Return the keyword arguments of `dcp_core.save` that select the storage for a checkpoint id."""
        if self._writer is None:
            return {"checkpoint_id": checkpoint_id}
        return {"storage_writer": self._writer(checkpoint_id)}

    def to_read(self, checkpoint_id: str) -> dict[str, Any]:
        """Return the keyword arguments of `dcp_core.load` that select the storage for a checkpoint id."""
        if self._reader is None:
            return {"checkpoint_id": checkpoint_id}
        return {"storage_reader": self._reader(checkpoint_id)}

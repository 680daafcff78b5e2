"""Common base of `ByteStorageReader` and `ByteStorageWriter`: checkpoint id, and the backend that reads and writes."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dcp_core.records.protocols import CheckpointId
from dcp_core.storage.checkpoint_ids import absolute_id

if TYPE_CHECKING:
    from dcp_io import StoreBackend

__all__ = ["ByteStorage"]


class ByteStorage:
    """Base class of storage readers and writers with a checkpoint id, whose backend is opened on first use.

    The constructor does not open the backend, because subclasses written for stock may pass an id that only their own
    `fs` can open, and set `fs` later.
    """

    ids_are_paths = False
    """Whether a checkpoint id without a URI scheme is a path; a relative path is made absolute at once."""

    _checkpoint_id: CheckpointId
    absolute_id: CheckpointId
    """The checkpoint id, with a relative path made absolute in the working folder at the time when the id was set."""
    _opened: StoreBackend | None = None

    def _set_id(self, checkpoint_id: CheckpointId) -> None:
        self._checkpoint_id = checkpoint_id
        self.absolute_id = absolute_id(checkpoint_id) if self.ids_are_paths else checkpoint_id
        self._opened = None

    @abstractmethod
    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        """Return the backend for a checkpoint id. Must not touch storage."""

    @property
    def _backend(self) -> StoreBackend:
        if self._opened is None:
            self._opened = self._open(self._id_to_open())
        return self._opened

    def _id_to_open(self) -> CheckpointId:
        return self.absolute_id

    def _reopen(self) -> None:
        """Open a new backend on next use, so that attributes that were set meanwhile take effect."""
        self._opened = None

    @property
    def checkpoint_id(self) -> CheckpointId:
        """Checkpoint id, as the caller passed it, of the current save or load, or of the last one."""
        return self._checkpoint_id

"""Checkpoint id and backend of a byte storage: the common base of its reader and its writer."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dcp_core.records.protocols import CheckpointId
from dcp_core.storage.checkpoint_ids import absolute_id

if TYPE_CHECKING:
    from dcp_io import StoreBackend

__all__ = ["ByteStorage"]


class ByteStorage:
    """Holds the checkpoint id, and opens its backend on first use.

    The backend is not opened sooner, because subclasses written for stock may pass an id that only their own `fs`
    understands, and set `fs` later.
    """

    ids_are_paths = False
    """Whether an id without a scheme is a path: a relative one is resolved when it is given."""

    _checkpoint_id: CheckpointId
    absolute_id: CheckpointId
    """The id as an absolute path, resolved in the working folder when it was given, if it is a relative path."""
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
        """The id, as it was given, of the checkpoint in use, or of the last one that was saved or loaded."""
        return self._checkpoint_id

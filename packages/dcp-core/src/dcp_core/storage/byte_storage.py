"""Checkpoint id and backend of a storage over a byte engine: what its reader and its writer have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dcp_core.records.protocols import CheckpointId
from dcp_core.storage.checkpoint_ids import absolute_id

if TYPE_CHECKING:
    from dcp_io import StoreBackend

__all__ = ["ByteStorage"]


class ByteStorage:
    """Holds the id of a checkpoint, and opens its backend when that is first needed.

    Not sooner: subclasses written for stock pass an id on that only their own `fs` understands, which they set later.
    """

    ids_are_paths = False
    """Whether an id without a scheme is a path: a relative one means the folder at the moment in which it is given."""

    _checkpoint_id: CheckpointId
    absolute_id: CheckpointId
    """The id with the working folder of the moment in which it was given, where it is a relative path."""
    _opened: StoreBackend | None = None

    def _set_id(self, checkpoint_id: CheckpointId) -> None:
        self._checkpoint_id = checkpoint_id
        self.absolute_id = absolute_id(checkpoint_id) if self.ids_are_paths else checkpoint_id
        self._opened = None

    @abstractmethod
    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        """The backend for one checkpoint id. Must not touch storage."""

    @property
    def _backend(self) -> StoreBackend:
        if self._opened is None:
            self._opened = self._open(self._id_to_open())
        return self._opened

    def _id_to_open(self) -> CheckpointId:
        return self.absolute_id

    def _reopen(self) -> None:
        """Open a new backend at the next need: attributes that were set since count from then on."""
        self._opened = None

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The id of the checkpoint that is, or was last, saved or loaded; as it was given."""
        return self._checkpoint_id

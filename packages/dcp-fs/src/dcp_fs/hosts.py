"""`HostWriter` and `HostReader`: storages of checkpoints whose files lie in a folder of each host, of the same path.

A save is committed when the coordinator has published the index in its place, after all hosts' data is durable; then
the other hosts publish the same bytes. A load asks all hosts what they have.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dcp_core import UnsupportedValueError
from dcp_core.toolkit import AgreedCopy, HostPlaces, agree_on_copy, find_places, library_logger
from dcp_fs.reader import FileSystemReader
from dcp_fs.writer import FileSystemWriter
from dcp_io import HostFolder, StoreBackend, open_store, scheme_of
from dcp_manifest import METADATA_NAME, CheckpointIndex, DcpError, InvalidPlaceError, read_index

__all__ = ["HostReader", "HostWriter"]

_log = library_logger(__name__)


class HostWriter(FileSystemWriter):
    """Storage writer for checkpoint ids `host:///path`: each host's ranks write into the folder that their host has.

    Arguments and guarantees: those of `FileSystemWriter`, over all hosts. A crash between the publishing of the first
    host and the others loses nothing: loads find the index wherever it is.
    """

    _places: HostPlaces | None = None

    def _own_path(self, checkpoint_id: str | os.PathLike[str]) -> Path:
        return Path(_store(checkpoint_id).path)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        backend = super()._open(checkpoint_id)
        backend.store = _store(checkpoint_id)
        return backend

    def _clear(self) -> None:
        super()._clear()
        self._places = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare the writer for a save on this rank; see `ByteStorageWriter`.

        Raises:
            UnsupportedValueError: The save is one without a coordinator.
        """
        if not kwargs.get("use_collectives", True):
            raise UnsupportedValueError(
                f"{self.checkpoint_id} is a folder of each host, which needs a save with use_collectives=True"
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def connect_ranks(self, coordinator: Any, plan: Any) -> None:
        """Find out which ranks share a folder, and begin the save in each folder. Ranks: every rank; collective."""
        root = _store(self.checkpoint_id).parent()
        self._places = places = find_places(coordinator, root)
        save_id = plan.storage_data.save_id

        def begin() -> None:
            if places.leads:
                places.claim(root)
            if places.leads and not coordinator.is_coordinator:
                self._backend.begin_save(overwrite=self.overwrite, save_id=save_id)

        coordinator.all_gather("begin", begin)

    def follow_commit(self, coordinator: Any) -> None:
        """Publish the index in the places of the other hosts. Ranks: every rank; collective if there are several."""
        places = self._places
        if places is None or places.count == 1:
            return
        leading = [
            leader == rank and rank != coordinator.coordinator_rank for rank, leader in enumerate(places.leaders)
        ]

        def read(_: list[None]) -> list[bytes | None]:
            data = self._backend.store.read(METADATA_NAME)
            return [data if leads else None for leads in leading]

        data = coordinator.reduce_scatter("index", lambda: None, read)
        coordinator.all_gather("other hosts", lambda: self._repeat(data))

    def _repeat(self, data: bytes | None) -> None:
        if data is None:
            return
        try:
            self._backend.publish(METADATA_NAME, data)
            self._backend.finish_save(read_index(data, file=METADATA_NAME).files)
        except (OSError, DcpError) as error:  # it is committed, and a later start publishes it here
            _log.warning("rank %d: the index was not repeated in %s: %s", self.rank, self._backend.url, error)
            self._backend.leave_save()

    def abort(self, error: BaseException) -> None:
        """Remove the files of a failed save, except on hosts that cannot know whether the coordinator has published."""
        places = self._places
        if places is None or places.coordinates or not places.leads:
            super().abort(error)
        else:
            self._backend.leave_save()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint id is a folder of each host."""
        return scheme_of(checkpoint_id) == "host"


class HostReader(FileSystemReader):
    """Storage reader for checkpoint ids `host:///path`: each file is read on a host that has it.

    Arguments: those of `FileSystemReader`. The ranks agree on one save, the newest that is complete over the hosts of
    the job and the folders that the id names beside (see `dcp_io.host_uri`), before any tensor changes. What no
    host has is read from those.
    """

    _agreed: AgreedCopy | None = None

    def _own_path(self, checkpoint_id: str | os.PathLike[str]) -> Path:
        return Path(_store(checkpoint_id).path)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        backend = super()._open(checkpoint_id)
        store = backend.store = _store(checkpoint_id)
        if self._agreed is not None:
            store.read_elsewhere(self._agreed.elsewhere)
        return backend

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load; a `checkpoint_id` replaces the one of the constructor."""
        self._agreed = None
        super().reset(checkpoint_id)

    def connect_ranks(self, coordinator: Any) -> None:
        """Agree on the save that all ranks load. Ranks: every rank; collective. Errors: see `agree_on_copy`."""
        store = _store(self.checkpoint_id)
        self._agreed = agree_on_copy(coordinator, store, find_places(coordinator, store.parent()))

    def read_index(self) -> CheckpointIndex:
        """Return the index of the save on which the ranks have agreed; without other ranks, that of this host."""
        if self._agreed is None:
            return super().read_index()
        self._reopen()
        index = read_index(self._agreed.index, file=METADATA_NAME)
        self._backend.use_index(index)
        return index

    @property
    def shares_index(self) -> bool:
        """False: all ranks have the index already."""
        return False

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint id is a folder of each host."""
        return scheme_of(checkpoint_id) == "host"


def _store(checkpoint_id: str | os.PathLike[str]) -> HostFolder:
    store = open_store(checkpoint_id)
    if not isinstance(store, HostFolder):
        raise InvalidPlaceError(f"{os.fspath(checkpoint_id)!r} is not a folder of each host: write host:///path")
    return store

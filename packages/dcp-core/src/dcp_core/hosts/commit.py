"""`HostCommit`: commits a save over host-local stores.

The save is committed when the coordinator publishes the index, after all hosts' data is durable. The other hosts then
publish the same bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from dcp_base import DcpError, InvalidPlaceError
from dcp_base.logs import library_logger
from dcp_core.errors import CheckpointException, UnsupportedValueError
from dcp_core.hosts.host_places import HostPlaces, find_places
from dcp_core.records.protocols import CheckpointId
from dcp_core.storage.storage_writer import ByteStorageWriter
from dcp_io import HostStore, open_store
from dcp_io.saves.save_session import HostSaveSession
from dcp_manifest import read_index
from dcp_manifest.folders.folder import METADATA_NAME

_log = library_logger(__name__)


def open_host_store(checkpoint_id: CheckpointId, storage_options: Mapping[str, Any] | None = None) -> HostStore:
    """Open a host-local store, or raise InvalidPlaceError."""
    store = open_store(checkpoint_id, storage_options=storage_options)
    if not isinstance(store, HostStore):
        raise InvalidPlaceError(
            f"{os.fspath(checkpoint_id)!r} is not a store of each host: write host:///path, or the URI of such a store"
        )
    return store


def names_host_store(checkpoint_id: CheckpointId) -> bool:
    """Return whether an id names a host-local store."""
    try:
        open_host_store(checkpoint_id)
    except (DcpError, ValueError):
        return False
    return True


class HostCommit(ByteStorageWriter):
    """Base class of storage writers for host-local stores: ranks write to their host's store.

    `ByteStorageWriter`'s guarantees hold over all hosts: after the first host published, loads find the index.
    """

    _places: HostPlaces | None = None
    _is_committed = False

    def _host_store(self) -> HostStore:
        return open_host_store(self.absolute_id)

    def _clear(self) -> None:
        super()._clear()
        self._places = None
        self._is_committed = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """UnsupportedValueError without a coordinator."""
        if not kwargs.get("use_collectives", True):
            raise UnsupportedValueError(
                f"{self.checkpoint_id} is a store of each host, which needs a save with use_collectives=True"
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def connect_ranks(self, coordinator: Any, plan: Any) -> None:
        """Begin the save in each store. Collective."""
        root = self._host_store().parent()
        self._places = places = find_places(coordinator, root)
        save_id = plan.storage_data.save_id

        def begin() -> None:
            if places.leads:
                places.claim(root)
            if places.leads and not coordinator.is_coordinator:
                self._backend.begin_save(overwrite=self.overwrite, save_id=save_id)

        coordinator.all_gather("begin", begin)

    def follow_commit(self, coordinator: Any) -> None:
        """Publish the index on the other hosts. Collective if there are several."""
        places = self._places
        self._is_committed = True
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
        except (OSError, DcpError) as error:  # the save is committed; a later start publishes the index here
            _log.warning("rank %d: could not copy the index to %s: %s", self.rank, self._backend.url, error)
            self._leave()

    def abort(self, error: BaseException) -> None:
        """Remove the failed save's files, except on hosts where it may have been published."""
        places = self._places
        if places is None or places.coordinates or not places.leads or self._is_unpublished(error, places):
            super().abort(error)
        else:
            self._leave()

    def _leave(self) -> None:
        with contextlib.suppress(DcpError):  # the session has ended
            session = self._backend.session
            if isinstance(session, HostSaveSession):
                session.may_be_published_elsewhere = True
        self._backend.abort_save()

    def _is_unpublished(self, error: BaseException, places: HostPlaces) -> bool:
        """Return whether another rank's failure, not its loss, proves that the coordinator has not published."""
        if self._is_committed or not isinstance(error, CheckpointException):
            return False
        failed = {rank: cause for rank, (cause, _) in error.failures.items() if rank != places.coordinator_rank}
        return any(isinstance(cause, OSError | DcpError) for cause in failed.values())

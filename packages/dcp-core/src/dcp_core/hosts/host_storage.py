"""Storage writer and reader for any host-local store, to register with a `dcp_base.StorageBackendSpec`.

A save is committed when the coordinator publishes the index, after all hosts' data is durable. The other hosts then
publish the same bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from dcp_base import DcpError, InvalidPlaceError
from dcp_base.logs import library_logger
from dcp_core.encoding.compression import Compression, ExtensionRegistry
from dcp_core.errors import CheckpointException, UnsupportedValueError
from dcp_core.hosts.agree import agree_on_copy
from dcp_core.hosts.held_copies import AgreedCopy
from dcp_core.hosts.host_places import HostPlaces, find_places
from dcp_core.records.protocols import CheckpointId
from dcp_core.storage.storage_reader import ByteStorageReader
from dcp_core.storage.storage_writer import ByteStorageWriter
from dcp_io import STALE_AFTER_SECONDS, HostStore, Layout, StoreBackend, Verify, open_store
from dcp_io.requests import check_options
from dcp_io.saves.save_session import HostSaveSession
from dcp_manifest import CheckpointIndex, read_index
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


class HostStorageWriter(ByteStorageWriter):
    """Storage writer for any host-local store's URI: ranks write to their host's store.

    `ByteStorageWriter`'s guarantees hold over all hosts: after the first host published, loads find the index.

    ```python
    import torch
    from dcp_core import save
    from dcp_core.hosts.host_storage import HostStorageWriter

    save({"weight": torch.ones(3)}, storage_writer=HostStorageWriter("host:///nvme/run/step-1", layout="raw"))
    ```

    Args:
        storage_options: Options of the store's package.
        layout: `torch` or `raw`, see `dcp_io.Layout`.
        thread_count: None for the available cores, at most 8.
        max_inflight_bytes: Limit of all threads' buffers.
        stale_after_seconds: Age of another host's marker at which its save counts as dead.
        overwrite, interop, compression: See `ByteStorageWriter`.
    """

    def __init__(
        self,
        checkpoint_id: CheckpointId,
        *,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = True,
        layout: Layout = "torch",
        interop: bool | None = None,
        thread_count: int | None = None,
        max_inflight_bytes: int = StoreBackend.default_inflight_bytes,
        stale_after_seconds: float = STALE_AFTER_SECONDS,
        compression: Compression = None,
    ) -> None:
        check_options(layout=layout, thread_count=thread_count, max_inflight_bytes=max_inflight_bytes)
        self.thread_count = thread_count or StoreBackend.default_threads()
        self.layout: Layout = layout
        self.max_inflight_bytes = max_inflight_bytes
        self.stale_after_seconds = stale_after_seconds
        self._storage_options = dict(storage_options or {})
        super().__init__(checkpoint_id, overwrite=overwrite, interop=interop, compression=compression)

    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        return StoreBackend(
            open_host_store(checkpoint_id, self._storage_options),
            layout=self.layout,
            threads=self.thread_count,
            stale_after_seconds=self.stale_after_seconds,
            max_inflight_bytes=self.max_inflight_bytes,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """See `names_host_store`."""
        return names_host_store(checkpoint_id)

    def _clear(self) -> None:
        super()._clear()
        self._places: HostPlaces | None = None
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
        root = open_host_store(self.absolute_id, self._storage_options).parent()
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


class HostStorageReader(ByteStorageReader):
    """Storage reader for any host-local store's URI: a host that has a file reads it.

    Before any tensor changes, the ranks agree on a save; see `agree_on_copy`.

    ```python
    import torch
    from dcp_core import load, save
    from dcp_core.hosts.host_storage import HostStorageReader

    save({"weight": torch.ones(3)}, checkpoint_id="host:///nvme/run/step-1")
    load({"weight": torch.zeros(3)}, storage_reader=HostStorageReader("host:///nvme/run/step-1", verify="full"))
    ```

    `verify` is a `dcp_io.Verify`; for other arguments see `HostStorageWriter` and `ByteStorageReader`.
    """

    _agreed: AgreedCopy | None = None

    def __init__(
        self,
        checkpoint_id: CheckpointId,
        *,
        storage_options: Mapping[str, Any] | None = None,
        verify: Verify = "blocks",
        thread_count: int | None = None,
        max_inflight_bytes: int = StoreBackend.default_inflight_bytes,
        extensions: ExtensionRegistry | None = None,
    ) -> None:
        check_options(verify=verify, thread_count=thread_count, max_inflight_bytes=max_inflight_bytes)
        self.verify: Verify = verify
        self.thread_count = thread_count or StoreBackend.default_threads()
        self.max_inflight_bytes = max_inflight_bytes
        self._storage_options = dict(storage_options or {})
        super().__init__(checkpoint_id, extensions=extensions)

    def _open_host_store(self) -> HostStore:
        return open_host_store(self.absolute_id, self._storage_options)

    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        del checkpoint_id
        store = self._open_host_store()
        if self._agreed is not None:
            store.read_elsewhere(self._agreed.elsewhere)  # the shared directories
        return StoreBackend(
            store,
            threads=self.thread_count,
            verify=self.verify,
            max_inflight_bytes=self.max_inflight_bytes,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """See `names_host_store`."""
        return names_host_store(checkpoint_id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """See `Storage`."""
        self._agreed = None
        super().reset(checkpoint_id)

    def connect_ranks(self, coordinator: Any) -> None:
        """Agree on the save to load. Collective."""
        self._agreed = agree_on_copy(coordinator, self._open_host_store())

    def read_index(self) -> CheckpointIndex:
        """Return the agreed save's index, or this host's without other ranks."""
        if self._agreed is None:
            return super().read_index()
        self._reopen()
        index = read_index(self._agreed.index, file=METADATA_NAME)
        self._backend.use_index(index)
        return index

    @property
    def shares_index(self) -> bool:
        """False: all ranks have the index."""
        return False

"""Storage writer and reader for any host-local store, to register with a `dcp_base.StorageBackendSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_core.encoding.compression import Compression, ExtensionRegistry
from dcp_core.hosts.agree import HostAgreement
from dcp_core.hosts.commit import HostCommit, names_host_store, open_host_store
from dcp_core.records.protocols import CheckpointId
from dcp_io import STALE_AFTER_SECONDS, HostStore, Layout, StoreBackend, Verify
from dcp_io.requests import check_options


class HostStorageWriter(HostCommit):
    """Storage writer for any host-local store's URI, with `HostCommit`'s guarantees.

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

    def _host_store(self) -> HostStore:
        return open_host_store(self.absolute_id, self._storage_options)

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


class HostStorageReader(HostAgreement):
    """Storage reader for any host-local store's URI; `HostAgreement` chooses the save.

    ```python
    import torch
    from dcp_core import load, save
    from dcp_core.hosts.host_storage import HostStorageReader

    save({"weight": torch.ones(3)}, checkpoint_id="host:///nvme/run/step-1")
    load({"weight": torch.zeros(3)}, storage_reader=HostStorageReader("host:///nvme/run/step-1", verify="full"))
    ```

    `verify` is a `dcp_io.Verify`; for other arguments see `HostStorageWriter` and `ByteStorageReader`.
    """

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
        return StoreBackend(
            self._host_store(),
            threads=self.thread_count,
            verify=self.verify,
            max_inflight_bytes=self.max_inflight_bytes,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """See `names_host_store`."""
        return names_host_store(checkpoint_id)

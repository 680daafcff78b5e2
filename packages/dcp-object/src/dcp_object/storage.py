"""Storage writer and reader for checkpoints in object stores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dcp_core import ByteStorageReader, ByteStorageWriter
from dcp_core.encoding.compression import Compression
from dcp_core.transforms import ExtensionRegistry
from dcp_io import STALE_AFTER_SECONDS, Layout, StoreBackend, Verify
from dcp_io.requests import check_options
from dcp_object.address import is_address
from dcp_object.opening import open_store
from dcp_object.sink import MAX_PART_BYTES, MIN_PART_BYTES, UPLOADS


class ObjectStoreWriter(ByteStorageWriter):
    """Storage writer for a folder in an object store; an old checkpoint stays loadable until the new one is published.

    Arguments that are not listed are those of `dcp_fs.FileSystemWriter`:

    - `checkpoint_id`: URI of the checkpoint's folder: `s3://bucket/folder`, `gs://…`, `az://…`, `abfs://…`.
    - `storage_options`: Options of the object store, or None; see `open_store`.
    - `thread_count`: Number of objects that this rank writes at the same time, each in parallel parts.
    - `uploads`: Number of parts of one object that are uploaded at the same time.
    - `spread`: Number of key prefixes (at most 256) over which data files are distributed; 0 for none. Useful with many
      ranks, for services that limit the rate of requests to each prefix.
    - `max_inflight_bytes`: Limit of the memory for the parts of all threads together. Parts have at least 5 MiB; if the
      limit is too small for `thread_count` x (`uploads` + 2) parts, fewer parts are uploaded at the same time.

    Example:
        ```python
        import torch
        from dcp_core import save
        from dcp_object import ObjectStoreWriter

        writer = ObjectStoreWriter("s3://bucket/run/step-1", storage_options={"region": "us-east-1"})
        save({"weight": torch.ones(3)}, storage_writer=writer)
        ```
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = True,
        layout: Layout = "torch",
        interop: bool | None = None,
        thread_count: int = 4,
        uploads: int = UPLOADS,
        spread: int = 0,
        max_inflight_bytes: int = 256 << 20,
        stale_after_seconds: float = STALE_AFTER_SECONDS,
        compression: Compression = None,
    ) -> None:
        if min(thread_count, uploads) < 1 or not 0 <= spread <= 256:
            raise ValueError(f"{thread_count=} and {uploads=} must be at least 1, {spread=} at most 256")
        if max_inflight_bytes < 3 * MIN_PART_BYTES:
            raise ValueError(f"{max_inflight_bytes=} must be at least {3 * MIN_PART_BYTES}: three parts of an upload")
        self.layout: Layout = layout
        self.spread = spread
        self.max_inflight_bytes = max_inflight_bytes
        self.stale_after_seconds = stale_after_seconds
        self.thread_count = min(thread_count, max_inflight_bytes // (3 * MIN_PART_BYTES))
        share = max_inflight_bytes // self.thread_count
        self.uploads = max(1, min(uploads, share // MIN_PART_BYTES - 2))
        self.part_bytes = max(MIN_PART_BYTES, min(MAX_PART_BYTES, share // (self.uploads + 2)))
        self._storage_options = dict(storage_options or {})
        super().__init__(checkpoint_id, overwrite=overwrite, interop=interop, compression=compression)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set up the writer. Raises ValueError for `spread` in a save without a coordinator."""
        if self.spread and not kwargs.get("use_collectives", True):
            raise ValueError("spread does not work with use_collectives=False: a rank could not clear up its files")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        store = open_store(
            checkpoint_id,
            storage_options=self._storage_options,
            part_bytes=self.part_bytes,
            uploads=self.uploads,
            spread=self.spread,
        )
        return StoreBackend(
            store,
            layout=self.layout,
            threads=self.thread_count,
            stale_after_seconds=self.stale_after_seconds,
            max_inflight_bytes=self.max_inflight_bytes,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an id has the scheme of an object store."""
        return is_address(checkpoint_id)


class ObjectStoreReader(ByteStorageReader):
    """Storage reader for a folder in an object store: reads byte ranges of objects, and checks their CRCs.

    Args:
        checkpoint_id: URI of the checkpoint's folder, as for `ObjectStoreWriter`.
        storage_options: Options of the object store, or None; see `open_store`.
        verify: CRC checks of the data; see `dcp_io.Verify`.
        thread_count: Number of concurrent requests of this rank.
        max_inflight_bytes: Limit of the memory for all running requests and buffers together.
        extensions: Registry in which stream transforms are looked up before installed packages; or None.

    Example:
        ```python
        import torch
        from dcp_core import load, save
        from dcp_object import ObjectStoreReader

        save({"weight": torch.ones(3)}, checkpoint_id="s3://bucket/run/step-1")
        load({"weight": torch.zeros(3)}, storage_reader=ObjectStoreReader("s3://bucket/run/step-1", thread_count=32))
        ```
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        verify: Verify = "blocks",
        thread_count: int = 16,
        max_inflight_bytes: int = 128 << 20,
        extensions: ExtensionRegistry | None = None,
    ) -> None:
        check_options(verify=verify, thread_count=thread_count, max_inflight_bytes=max_inflight_bytes)
        self.verify: Verify = verify
        self.thread_count = thread_count
        self.max_inflight_bytes = max_inflight_bytes
        self._storage_options = dict(storage_options or {})
        super().__init__(checkpoint_id, extensions=extensions)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        return StoreBackend(
            open_store(checkpoint_id, storage_options=self._storage_options),
            threads=self.thread_count,
            verify=self.verify,
            # What a request brings is in memory once more until it lies in its destination.
            max_inflight_bytes=max(1, self.max_inflight_bytes // 2),
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an id has the scheme of an object store."""
        return is_address(checkpoint_id)

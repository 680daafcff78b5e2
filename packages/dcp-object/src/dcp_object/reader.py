"""`ObjectStoreReader`: storage reader for checkpoints of this project and of stock in object stores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dcp_core import ByteStorageReader
from dcp_core.transforms import ExtensionRegistry
from dcp_io import StoreBackend, Verify, check_verify
from dcp_object.address import is_address
from dcp_object.opening import open_store

__all__ = ["ObjectStoreReader"]


class ObjectStoreReader(ByteStorageReader):
    """Storage reader for a folder in an object store: reads byte ranges of objects, and checks their CRCs.

    Args:
        checkpoint_id: URI of the checkpoint's folder: `s3://bucket/folder`, `gs://…`, `az://…`, `abfs://…`.
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
        check_verify(verify)
        if thread_count < 1 or max_inflight_bytes < 1:
            raise ValueError(f"{thread_count=} and {max_inflight_bytes=} must be at least 1")
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
        """Whether a checkpoint id is a URI with the scheme of an object store."""
        return is_address(checkpoint_id)

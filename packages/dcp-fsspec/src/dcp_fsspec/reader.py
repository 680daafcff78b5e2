"""`FsspecReader`: storage reader for checkpoints of this project and of stock in any fsspec file system."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dcp_core import ByteStorageReader
from dcp_core.toolkit import FileAttributes
from dcp_fsspec.filesystem import FileSystem, init_path, made_file_system
from dcp_fsspec.opening import is_fsspec_id, open_store
from dcp_io import StoreBackend, StreamStore, Verify, check_verify

__all__ = ["FsspecReader"]


class FsspecReader(FileAttributes, ByteStorageReader):
    """Storage reader for a folder of an fsspec file system: reads byte ranges of files, and checks their CRCs.

    Args:
        path: URI of the checkpoint's folder, `scheme://…`.
        verify: CRC checks of the data; see `dcp_io.Verify`.
        thread_count: Number of concurrent requests of this rank.
        max_inflight_bytes: Limit of the memory for all running requests and buffers together.
        storage_options: Options of the file system, as fsspec takes them, or None. Never logged.
        kwargs: Further options of the file system; stock takes its options this way.

    Source: torch 2.13 `torch.distributed.checkpoint._fsspec_filesystem.FsspecReader` (`path` and `kwargs`).

    Example:
        ```python
        import torch
        from dcp_core import load, save
        from dcp_fsspec import FsspecReader

        save({"weight": torch.ones(3)}, checkpoint_id="memory://run/step-1")
        load({"weight": torch.zeros(3)}, storage_reader=FsspecReader("memory://run/step-1", verify="before"))
        ```
    """

    ids_are_paths = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "blocks",
        thread_count: int = 8,
        max_inflight_bytes: int = 128 << 20,
        storage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_verify(verify)
        if thread_count < 1 or max_inflight_bytes < 1:
            raise ValueError(f"{thread_count=} and {max_inflight_bytes=} must be at least 1")
        self.verify: Verify = verify
        self.thread_count = thread_count
        self.max_inflight_bytes = max_inflight_bytes
        self._options = {**(storage_options or {}), **kwargs}
        super().__init__(path)

    def _make_fs(self) -> FileSystem:
        return made_file_system(self.checkpoint_id, self._options)

    def _init_path(self, checkpoint_id: str | os.PathLike[str]) -> Any:
        return init_path(self.fs, checkpoint_id, self._options)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        fs = self.foreign_fs
        store = (
            open_store(checkpoint_id, storage_options=self._options)
            if fs is None
            else StreamStore(fs, self._path_of(checkpoint_id))
        )
        return StoreBackend(
            store,
            threads=self.thread_count if fs is None else 1,  # streams of others are read one at a time, as in stock
            verify=self.verify,
            # What a request brings is in memory once more until it lies in its destination.
            max_inflight_bytes=max(1, self.max_inflight_bytes // 2),
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint id is a URI for which fsspec has a file system."""
        return is_fsspec_id(checkpoint_id)

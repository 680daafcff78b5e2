"""`FileSystemReader`: storage reader for checkpoints of this project and of stock in a local or mounted folder."""

from __future__ import annotations

import os
from pathlib import Path

from dcp_core import ByteStorageReader
from dcp_core.toolkit import FileAttributes
from dcp_core.transforms import ExtensionRegistry
from dcp_fs.filesystem import FileSystem
from dcp_fs.layout import default_thread_count
from dcp_fs.paths import is_local_id, local_path, store_of
from dcp_io import StoreBackend, Verify, check_verify

__all__ = ["FileSystemReader"]


class FileSystemReader(FileAttributes, ByteStorageReader):
    """Storage reader for a local or mounted folder; checks the CRCs of the data that it reads.

    Args:
        path: The checkpoint's folder.
        _extension_registry: Registry in which stream transforms are looked up before installed packages; or None.
        verify: CRC checks of the data. `blocks` or True (the default): check the CRC blocks that are read. `full`:
            check whole items, also if only a slice is loaded. `before`: check all data before any tensor of the
            template changes. False: check nothing.
        thread_count: Number of reader threads; None takes the number of cores that this process may use, at most 8.
        max_inflight_bytes: Limit of the memory for buffers of all threads together, at least 1 MiB. Tensors that cannot
            be read in place (slices of columns, other strides, dtypes or devices) are copied through these buffers. The
            limit does not cover objects, nor tensors that stock stored in an unusual form: these are decoded in memory,
            one by one.

    Source: torch 2.13 `torch.distributed.checkpoint.filesystem.FileSystemReader` (the first two parameters).

    Example:
        ```python
        import torch
        from dcp_core import load, save
        from dcp_fs import FileSystemReader

        save({"weight": torch.ones(3)}, checkpoint_id="step-1")
        load({"weight": torch.zeros(3)}, storage_reader=FileSystemReader("step-1", verify="before"))
        ```
    """

    ids_are_paths = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: ExtensionRegistry | None = None,
        *,
        verify: Verify = "blocks",
        thread_count: int | None = None,
        max_inflight_bytes: int = 64 << 20,
    ) -> None:
        if type(self) is FileSystemReader:  # a subclass may set another file system, whose ids are its own
            local_path(path)
        check_verify(verify)
        self.verify: Verify = "blocks" if verify is True else verify
        if max_inflight_bytes < 1:
            raise ValueError(f"max_inflight_bytes={max_inflight_bytes} must be at least 1")
        self.thread_count = thread_count or default_thread_count()
        self.max_inflight_bytes = max_inflight_bytes
        super().__init__(path, extensions=_extension_registry)

    def _make_fs(self) -> FileSystem:
        return FileSystem()

    def _own_path(self, checkpoint_id: str | os.PathLike[str]) -> Path:
        return local_path(checkpoint_id)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        fs = self.foreign_fs
        return StoreBackend(
            store_of(fs, self._path_of(checkpoint_id)),
            threads=self.thread_count if fs is None else 1,  # streams of others are read one at a time, as in stock
            verify=self.verify,
            max_inflight_bytes=self.max_inflight_bytes,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint id is the path or URI of a local folder."""
        return is_local_id(checkpoint_id)

"""`FileSystemWriter`: storage writer for checkpoints in a local or mounted folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dcp_core import BlockingAsyncStager, ByteStorageWriter
from dcp_core.toolkit import Compression, FileAttributes, SerializationFormat, check_format, one_setting
from dcp_core.transforms import StreamTransformExtension
from dcp_fs.filesystem import FileSystem
from dcp_fs.layout import default_thread_count
from dcp_fs.paths import is_local_id, local_path, store_of
from dcp_io import STALE_AFTER_SECONDS, Layout, StoreBackend, check_layout

__all__ = ["FileSystemWriter"]

DEFAULT_INFLIGHT_BYTES = 64 << 20


class FileSystemWriter(FileAttributes, ByteStorageWriter, BlockingAsyncStager):
    """Storage writer for a local or mounted folder; an old checkpoint stays loadable until the new one is published.

    Args:
        path: Path of the checkpoint's folder, which is made if missing.
        single_file_per_rank: Whether each writer thread writes one file (True), or one file per item (False).
        sync_files: Whether files are flushed to the disk (fsync) before the checkpoint is published. If False, a crash
            of the machine may lose a checkpoint after `save` has returned; a crash of the process does not.
        thread_count: Number of writer threads; None takes the number of cores that this process may use, at most 8.
        per_thread_copy_ahead: Bytes that each thread may copy from an accelerator ahead of writing, if
            `max_inflight_bytes` is not given.
        cache_staged_state_dict: Whether staging reuses host memory of the last save; see `BlockingAsyncStager`.
        overwrite: Whether an existing checkpoint in the folder may be replaced.
        _extensions: Stream transforms of every item (`dcp_transforms.ZStandard()`, …): the last one in the list encodes
            first, the first one writes to the file. To load a slice of such an item, the whole item is read.
        serialization_format: Only `TORCH_SAVE`; stock's other format writes files that cannot be loaded.
        compression: How items are encoded: `auto` (each tensor in blocks, with the smallest result), `planes`, `zstd`
            (readable by stock), `none` or None, a transform, a list of them, or a mapping from dtypes or patterns of
            names to one of these; see `dcp_core.encoding.compression.CompressionPolicy`. Cannot be combined with
            `_extensions`.
        layout: `torch` (readable by stock) or `raw` (smaller and faster to write, not readable by stock).
        interop: Whether to write an index that `torch.distributed.checkpoint` can load, if the layout allows it.
        max_inflight_bytes: Limit of the memory for buffers of all threads together. Tensors on an accelerator, and
            views that are not contiguous, are copied through these buffers while they are written. None for 64 MiB, or
            more if `per_thread_copy_ahead` requires more.
        stale_after_seconds: A save of another host counts as dead, and its leftovers are removed, when it has not
            renewed its marker for this long.

    Source: torch 2.13 `torch.distributed.checkpoint.filesystem.FileSystemWriter` (parameters up to
    `serialization_format`; the default of `thread_count` is 1 there).

    Example:
        ```python
        import torch
        from dcp_core import save
        from dcp_fs import FileSystemWriter

        writer = FileSystemWriter("step-1", thread_count=4, layout="raw")
        save({"weight": torch.ones(3)}, storage_writer=writer)
        ```
    """

    ids_are_paths = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        compression: Compression = None,
        layout: Layout = "torch",
        interop: bool = True,
        max_inflight_bytes: int | None = None,
        stale_after_seconds: float = STALE_AFTER_SECONDS,
    ) -> None:
        if type(self) is FileSystemWriter:  # a subclass may set another file system, whose ids are its own
            local_path(path)
        check_layout(layout)
        check_format(serialization_format)
        setting = one_setting(_extensions, compression)
        if thread_count is not None and thread_count < 1:
            raise ValueError(f"thread_count={thread_count} must be at least 1")
        if max_inflight_bytes is not None and max_inflight_bytes < 1:
            raise ValueError(f"max_inflight_bytes={max_inflight_bytes} must be at least 1")
        self.serialization_format = serialization_format
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count or default_thread_count()
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.layout = layout
        self.max_inflight_bytes = max_inflight_bytes or max(
            DEFAULT_INFLIGHT_BYTES, self.thread_count * per_thread_copy_ahead
        )
        self.stale_after_seconds = stale_after_seconds
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        ByteStorageWriter.__init__(self, path, overwrite=overwrite, interop=interop, compression=setting)

    def _make_fs(self) -> FileSystem:
        return FileSystem()

    def _own_path(self, checkpoint_id: str | os.PathLike[str]) -> Path:
        return local_path(checkpoint_id)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        check_format(self.serialization_format)  # which may have been set since
        return StoreBackend(
            store_of(self.foreign_fs, self._path_of(checkpoint_id)),
            layout=self.layout,
            threads=self.thread_count,
            single_file=self.single_file_per_rank,
            sync=self.sync_files,
            stale_after_seconds=self.stale_after_seconds,
            max_inflight_bytes=self.max_inflight_bytes,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint id is the path or URI of a local folder that can be written."""
        return is_local_id(checkpoint_id)

"""Storage writer and reader for checkpoints in any fsspec file system."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from dcp_core import BlockingAsyncStager, ByteStorageReader, ByteStorageWriter
from dcp_core.encoding.compression import Compression, one_setting
from dcp_core.storage.byte_storage import FileAttributes, SerializationFormat, check_format
from dcp_core.transforms import ItemStreams, StreamTransformExtension
from dcp_fsspec.filesystem import FileSystem, init_path, made_file_system
from dcp_fsspec.opening import is_fsspec_id, open_store
from dcp_io import STALE_AFTER_SECONDS, Layout, StoreBackend, Verify
from dcp_io.requests import check_options
from dcp_io.stores.stream_store import StreamStore

_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 5 << 20, 64 << 20


class _Folder(FileAttributes):
    ids_are_paths = True
    _options: dict[str, Any]

    def _make_fs(self) -> FileSystem:
        return made_file_system(self.checkpoint_id, self._options)

    def _init_path(self, checkpoint_id: str | os.PathLike[str]) -> Any:
        return init_path(self.fs, checkpoint_id, self._options)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_fsspec_id(checkpoint_id)


class FsspecWriter(_Folder, ByteStorageWriter, BlockingAsyncStager):
    """Storage writer for a folder of an fsspec file system; an old checkpoint stays loadable until the new one exists.

    Arguments that are not listed are those of `dcp_fs.FileSystemWriter`:

    - `path`: URI of the checkpoint's folder, `scheme://…`.
    - `sync_files`: Ignored; stock has it. No call of fsspec makes acknowledged writes more durable.
    - `thread_count`: Number of writer threads of this rank.
    - `storage_options`: Options of the file system, as fsspec takes them, or None. Never logged.
    - `cache_staged_state_dict`: See `BlockingAsyncStager`; stock has this parameter from torch 2.15 on.
    - `kwargs`: Further options of the file system; stock takes its options this way.

    Source: torch 2.13 `torch.distributed.checkpoint._fsspec_filesystem.FsspecWriter` (parameters up to
    `serialization_format`, and `kwargs`).

    Example:
        ```python
        import torch
        from dcp_core import save
        from dcp_fsspec import FsspecWriter

        writer = FsspecWriter("memory://run/step-1", thread_count=4)  # or "sftp://host/run/step-1", …
        save({"weight": torch.ones(3)}, storage_writer=writer)
        ```
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: Enum = SerializationFormat.TORCH_SAVE,
        *,
        compression: Compression = None,
        layout: Layout = "torch",
        interop: bool | None = None,
        max_inflight_bytes: int | None = None,
        stale_after_seconds: float = STALE_AFTER_SECONDS,
        storage_options: Mapping[str, Any] | None = None,
        cache_staged_state_dict: bool = False,
        **kwargs: Any,
    ) -> None:
        setting = one_setting(_extensions, compression)
        self.transforms = ItemStreams(_extensions)
        check_options(layout=layout, thread_count=thread_count, max_inflight_bytes=max_inflight_bytes)
        self.serialization_format = serialization_format
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.layout: Layout = layout
        self.max_inflight_bytes = max_inflight_bytes or max(
            StoreBackend.default_inflight_bytes, thread_count * per_thread_copy_ahead
        )
        self.stale_after_seconds = stale_after_seconds
        self._options = {**(storage_options or {}), **kwargs}
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        ByteStorageWriter.__init__(self, path, overwrite=overwrite, interop=interop, compression=setting)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        check_format(self.serialization_format)
        block_bytes = self.max_inflight_bytes // self.thread_count // 2
        fs = self.foreign_fs
        store = (
            StreamStore(fs, self._path_of(checkpoint_id))
            if fs is not None
            else open_store(
                checkpoint_id,
                storage_options=self._options,
                block_bytes=max(_MIN_BLOCK_BYTES, min(_MAX_BLOCK_BYTES, block_bytes)),
            )
        )
        return StoreBackend(
            store,
            layout=self.layout,
            threads=self.thread_count,
            single_file=self.single_file_per_rank,
            sync=self.sync_files,
            stale_after_seconds=self.stale_after_seconds,
            max_inflight_bytes=self.max_inflight_bytes,
        )


class FsspecReader(_Folder, ByteStorageReader):
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
        check_options(verify=verify, thread_count=thread_count, max_inflight_bytes=max_inflight_bytes)
        self.verify: Verify = verify
        self.thread_count = thread_count
        self.max_inflight_bytes = max_inflight_bytes
        self._options = {**(storage_options or {}), **kwargs}
        super().__init__(path)

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

"""Storage writer and reader of a local or mounted folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dcp_base.schemes import file_path
from dcp_core import BlockingAsyncStager, ByteStorageReader, ByteStorageWriter
from dcp_core.encoding.compression import Compression, CompressionPolicy, one_setting
from dcp_core.storage.byte_storage import FileAttributes, SerializationFormat, check_format
from dcp_core.tensors.tensor_memory import TensorPieces
from dcp_core.transforms import ExtensionRegistry, ItemStreams, StreamTransformExtension
from dcp_fs.filesystem import FileSystem, is_local_id
from dcp_io import STALE_AFTER_SECONDS, Layout, LocalStore, StoreBackend, Verify, Writable
from dcp_io.requests import check_options
from dcp_io.stores.stream_store import StreamStore
from dcp_manifest.index.stored_items import StoredItems


class _LocalFolder(FileAttributes):
    ids_are_paths = True

    def _make_fs(self) -> FileSystem:
        return FileSystem()

    def _own_path(self, checkpoint_id: str | os.PathLike[str]) -> Path:
        return Path(file_path(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_local_id(checkpoint_id)


class FileSystemWriter(_LocalFolder, ByteStorageWriter, BlockingAsyncStager):
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
            None: up to 1,000,000 chunks.
        max_inflight_bytes: Limit of the memory for buffers of all threads together. Tensors on an accelerator, and
            views that are not contiguous, are copied through these buffers. None for 64 MiB, or more if
            `per_thread_copy_ahead` requires more.
        parts: Prefixes such as `app.model`. A part's values get files of their own: removing a part copies nothing.
        deduplicate: Whether files of the parent directory's newest checkpoint become hard links; or the path of another
            checkpoint to compare with.
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
        interop: bool | None = None,
        max_inflight_bytes: int | None = None,
        parts: Sequence[str] = (),
        deduplicate: bool | str | os.PathLike[str] = False,
        stale_after_seconds: float = STALE_AFTER_SECONDS,
    ) -> None:
        if type(self) is FileSystemWriter:  # a subclass may set another file system, whose ids are its own
            file_path(path)
        check_options(layout=layout, thread_count=thread_count, max_inflight_bytes=max_inflight_bytes)
        check_format(serialization_format)
        setting = one_setting(_extensions, compression)
        self.transforms = ItemStreams(_extensions)
        self.serialization_format = serialization_format
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count or StoreBackend.default_threads()
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.layout = layout
        copied_bytes = self.thread_count * per_thread_copy_ahead
        self.max_inflight_bytes = max_inflight_bytes or max(StoreBackend.default_inflight_bytes, copied_bytes)
        self.stale_after_seconds = stale_after_seconds
        self._parts = [parts] if isinstance(parts, str) else [*parts]
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        ByteStorageWriter.__init__(self, path, overwrite=overwrite, interop=interop, compression=setting)
        if deduplicate:
            if setting is not None or not sync_files:
                raise ValueError("deduplicate excludes compression and sync_files=False")
            self._compression = _Deduplicate(None if deduplicate is True else deduplicate)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        check_format(self.serialization_format)  # which may have been set since
        fs, folder = self.foreign_fs, self._path_of(checkpoint_id)
        return StoreBackend(
            LocalStore(folder) if fs is None else StreamStore(fs, folder),
            layout=self.layout,
            threads=self.thread_count,
            single_file=self.single_file_per_rank,
            sync=self.sync_files,
            parts=self._parts,
            stale_after_seconds=self.stale_after_seconds,
            max_inflight_bytes=self.max_inflight_bytes,
        )


class FileSystemReader(_LocalFolder, ByteStorageReader):
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
            in order.

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

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: ExtensionRegistry | None = None,
        *,
        verify: Verify = "blocks",
        thread_count: int | None = None,
        max_inflight_bytes: int = StoreBackend.default_inflight_bytes,
    ) -> None:
        if type(self) is FileSystemReader:  # a subclass may set another file system, whose ids are its own
            file_path(path)
        check_options(verify=verify, thread_count=thread_count, max_inflight_bytes=max_inflight_bytes)
        self.verify: Verify = "blocks" if verify is True else verify
        self.thread_count = thread_count or StoreBackend.default_threads()
        self.max_inflight_bytes = max_inflight_bytes
        super().__init__(path, extensions=_extension_registry)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        fs, folder = self.foreign_fs, self._path_of(checkpoint_id)
        return StoreBackend(
            LocalStore(folder) if fs is None else StreamStore(fs, folder),
            threads=self.thread_count if fs is None else 1,  # streams of others are read one at a time, as in stock
            verify=self.verify,
            max_inflight_bytes=self.max_inflight_bytes,
        )


class _Deduplicate(CompressionPolicy):
    def __init__(self, base: str | os.PathLike[str] | None) -> None:
        from dcp_io.writing.deduplication import Deduplication  # noqa: PLC0415 - optional

        super().__init__(None)
        self._deduplication = Deduplication(base, (TensorPieces,))

    def write(self, backend: StoreBackend, requests: Sequence[Writable], *, prefix: str, save_id: str) -> StoredItems:
        return self._deduplication.write(backend, requests, prefix=prefix, save_id=save_id)

"""Conversion of a checkpoint folder (ours or stock's) to content, and of content to a checkpoint folder.

Source: torch 2.13 `torch.distributed.checkpoint.filesystem` (what its folders hold; read by `dcp_manifest`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version

import numpy as np

from dcp_core.toolkit import CompressedRequest, Compression, CompressionPolicy
from dcp_format.checkpoints.stored_content import stored_content
from dcp_format.content.content import Content, TensorEntry
from dcp_io import Layout, LocalStore, Payload, PiecewiseData, StoreBackend, Writable, WriteRequest, open_store
from dcp_manifest import (
    METADATA_NAME,
    CheckpointIndex,
    Framing,
    ManifestInfo,
    StoredItems,
    TensorFlags,
    encode,
    is_index_name,
)

__all__ = ["is_checkpoint", "open_checkpoint", "write_checkpoint"]

_THREADS = 2
Tick = Callable[[int], None]


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a folder or URI holds the index of a checkpoint."""
    store = open_store(path)
    if isinstance(store, LocalStore) and not os.path.isdir(store.path):
        return False
    return any(is_index_name(entry.name) for entry in store.list())


def open_checkpoint(path: str | os.PathLike[str]) -> Content:
    """Open the checkpoint at a path or URI as content; raises as `open_store`, `read_index` and `stored_content`."""
    store = open_store(path)
    return stored_content(store, StoreBackend(store).read_index())


def write_checkpoint(
    content: Content,
    path: str | os.PathLike[str],
    *,
    max_inflight_bytes: int,
    overwrite: bool = True,
    layout: Layout = "torch",
    compression: Compression = None,
    tick: Tick = lambda _: None,
) -> None:
    """Write content as a checkpoint; the folder keeps its old checkpoint until the new one is published.

    Args:
        content: What to write.
        path: The folder, or a URI that an installed storage opens.
        max_inflight_bytes: Memory for pieces of tensors, all threads together.
        overwrite: Whether a checkpoint that is there may be replaced.
        layout: `torch` (readable by stock) or `raw`.
        compression: What items go through, as for `FileSystemWriter`.
        tick: Progress callback: called with the number of bytes just read from the source.
    """
    backend = StoreBackend(open_store(path), layout=layout, threads=_THREADS, max_inflight_bytes=max_inflight_bytes)
    tensors = [*content.tensors.values()]
    requests: list[Writable] = [_tensor_request(entry, tick) for entry in tensors]
    requests += [_object_request(name, read) for name, read in content.objects.items()]
    policy = CompressionPolicy(compression)
    if not policy.changes_nothing:
        requests = [CompressedRequest(request, policy) for request in requests]
    save_id = backend.begin_save(overwrite=overwrite)
    try:
        stored = backend.write(requests, prefix="__0_", save_id=save_id)
        info = ManifestInfo(
            save_id=save_id,
            world_size=1,
            writer=f"dcp-format/{version('dcp-format')}",
            generation=backend.generation,
            created_ns=time.time_ns(),
        )
        index = _index(content, tensors, stored, info)
        backend.publish(METADATA_NAME, encode(index))
    except BaseException:
        backend.abort_save()
        raise
    backend.finish_save(index.files)


def _tensor_request(entry: TensorEntry, tick: Tick) -> WriteRequest:
    def resolve() -> Payload:
        return Payload(_Ticking(entry.data, tick), Framing.RAW, entry.dtype, entry.shape)

    return WriteRequest(entry.name, entry.data.nbytes, resolve)


def _object_request(name: str, read: Callable[[], bytes]) -> WriteRequest:
    return WriteRequest(name, 0, lambda: Payload(read(), Framing.OBJECT))


class _Ticking:
    """Tensor data that reports progress to a callback."""

    def __init__(self, data: PiecewiseData, tick: Tick) -> None:
        self._data = data
        self._tick = tick
        self.nbytes = data.nbytes

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the pieces as they come."""
        for piece in self._data.pieces(max_bytes):
            yield piece
            self._tick(len(piece))


def _index(
    content: Content, tensors: Sequence[TensorEntry], stored: StoredItems, info: ManifestInfo
) -> CheckpointIndex:
    rows = {entry.name: row for row, entry in enumerate(tensors)}
    dtypes = tuple(dict.fromkeys(entry.dtype for entry in tensors))
    count = len(tensors)
    shape = np.array([size for entry in tensors for size in entry.shape], np.int64)
    chunks = stored.take(np.arange(count))
    objects = stored.take(np.arange(count, len(stored)))
    flags = [replace(TensorFlags(), requires_grad=entry.requires_grad).to_bits() for entry in tensors]
    return CheckpointIndex(
        dtypes=dtypes,
        files=stored.files,
        chains=stored.chains,
        tensor_names=[entry.name for entry in tensors],
        tensor_dtype=np.array([dtypes.index(entry.dtype) for entry in tensors], np.uint8),
        tensor_flags=np.array(flags, np.uint8),
        tensor_ndim=np.array([len(entry.shape) for entry in tensors], np.uint8),
        tensor_owner=np.zeros(count, np.uint32),
        tensor_shape=shape,
        tensor_chunks=np.ones(count, np.int64),
        chunk_offsets=np.zeros_like(shape),
        chunk_sizes=shape.copy(),
        chunk_items=chunks.columns,
        object_names=[*content.objects],
        object_owner=np.zeros(len(content.objects), np.uint32),
        object_items=objects.columns,
        alias_names=[*content.aliases],
        alias_targets=np.array([rows[target] for target in content.aliases.values()], np.uint32),
        paths=content.paths,
        info=info,
    )

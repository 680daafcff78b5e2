"""Conversion of a checkpoint (of this project or stock) to a `Content`, and of a `Content` to a checkpoint folder.

Source: torch 2.13 `torch.distributed.checkpoint.filesystem` (contents of its folders; `dcp_manifest` reads them).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version

import numpy as np

from dcp_core.toolkit import CompressedRequest, CompressionPolicy
from dcp_format.checkpoints.stored_content import stored_content
from dcp_format.content.content import Content, TensorEntry, ticking
from dcp_format.content.write_options import WriteOptions
from dcp_io import LocalStore, Payload, StoreBackend, Writable, WriteRequest, open_store
from dcp_manifest import (
    METADATA_NAME,
    CheckpointIndex,
    Framing,
    ManifestInfo,
    StoredItems,
    TensorFlags,
    TensorForm,
    encode,
    is_index_name,
    tensor_columns,
)

__all__ = ["is_checkpoint", "open_checkpoint", "write_checkpoint"]

_THREADS = 2


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint, with an index, at a path or URI."""
    store = open_store(path)
    if isinstance(store, LocalStore) and not os.path.isdir(store.path):
        return False
    return any(is_index_name(entry.name) for entry in store.list())


def open_checkpoint(path: str | os.PathLike[str]) -> Content:
    """Open the checkpoint at a path or URI as a `Content`. Errors: see `open_store`, `read_index`, `stored_content`."""
    store = open_store(path)
    return stored_content(store, StoreBackend(store).read_index())


def write_checkpoint(content: Content, path: str | os.PathLike[str], options: WriteOptions) -> None:
    """Write a `Content` as a checkpoint; an old checkpoint in the folder stays until the new one is published.

    Args:
        content: The tensors and objects to write.
        path: Path of the folder, or a URI that an installed storage opens.
        options: Options for writing. All threads together use `max_inflight_bytes`; `tick` is called with the number of
            bytes just read from the source.
    """
    content = ticking(content, options.tick)
    store, memory = open_store(path), options.max_inflight_bytes
    backend = StoreBackend(store, layout=options.layout, threads=_THREADS, max_inflight_bytes=memory)
    tensors = [*content.tensors.values()]
    requests: list[Writable] = [_tensor_request(entry) for entry in tensors]
    requests += [_object_request(name, read) for name, read in content.objects.items()]
    policy = CompressionPolicy(options.compression)
    if policy.adapts:
        raise ValueError("compression='adaptive' is for the saves of a training; choose auto or none")
    if not policy.changes_nothing:
        requests = [CompressedRequest(request, policy) for request in requests]
    save_id = backend.begin_save(overwrite=options.overwrite)
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


def _tensor_request(entry: TensorEntry) -> WriteRequest:
    payload = Payload(entry.data, Framing.RAW, entry.dtype, entry.shape)
    return WriteRequest(entry.name, entry.data.nbytes, lambda: payload)


def _object_request(name: str, read: Callable[[], bytes]) -> WriteRequest:
    return WriteRequest(name, 0, lambda: Payload(read(), Framing.OBJECT))


def _index(
    content: Content, tensors: Sequence[TensorEntry], stored: StoredItems, info: ManifestInfo
) -> CheckpointIndex:
    count = len(tensors)
    rows = {entry.name: row for row, entry in enumerate(tensors)}
    return replace(
        tensor_columns([_form(entry) for entry in tensors]),
        files=stored.files,
        chains=stored.chains,
        chunk_items=stored.take(np.arange(count)).columns,
        object_names=[*content.objects],
        object_owner=np.zeros(len(content.objects), np.uint32),
        object_items=stored.take(np.arange(count, len(stored))).columns,
        alias_names=[*content.aliases],
        alias_targets=np.array([rows[target] for target in content.aliases.values()], np.uint32),
        paths=content.paths,
        info=info,
    )


def _form(entry: TensorEntry) -> TensorForm:
    flags = TensorFlags(requires_grad=entry.requires_grad).to_bits()
    return TensorForm(entry.name, entry.dtype, entry.shape, [((0,) * len(entry.shape), entry.shape)], flags)

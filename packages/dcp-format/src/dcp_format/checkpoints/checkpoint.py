"""Conversion of a checkpoint (of this project or stock) to a `Content`, and of a `Content` to a checkpoint folder.

Source: torch 2.13 `torch.distributed.checkpoint.filesystem` (contents of its folders; `dcp_manifest` reads them).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version

import numpy as np

from dcp_core.encoding.compression import CompressionPolicy
from dcp_core.errors import CorruptCheckpointError, UnsupportedValueError
from dcp_format.checkpoints.stored_chunks import DecodingReader
from dcp_format.content.content import Content, TensorEntry, WriteOptions, ticking
from dcp_io import LocalStore, Payload, Store, StoreBackend, Writable, WriteRequest, open_store
from dcp_manifest import CheckpointIndex, StoredTensor, stored_tensors
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.folders.folder import METADATA_NAME, is_index_name
from dcp_manifest.index.boxes import coverage_problems
from dcp_manifest.index.columns import Framing, ManifestInfo, TensorFlags
from dcp_manifest.index.stored_items import StoredItems
from dcp_manifest.index.stored_tensors import TensorForm, stored_objects, tensor_columns

_THREADS = 2


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint, with an index, at a path or URI."""
    store = open_store(path)
    if isinstance(store, LocalStore) and not os.path.isdir(store.path):
        return False
    return any(is_index_name(entry.name) for entry in store.list())


def open_checkpoint(path: str | os.PathLike[str]) -> Content:
    """Open the checkpoint at a path or URI as a `Content`."""
    store = open_store(path)
    return stored_content(store, StoreBackend(store).read_index())


def write_checkpoint(content: Content, path: str | os.PathLike[str], options: WriteOptions) -> None:
    """Write a `Content` as a checkpoint; an old checkpoint in the folder stays until the new one is published."""
    content = ticking(content, options.tick)
    store, memory = open_store(path), options.max_inflight_bytes
    backend = StoreBackend(store, layout=options.layout, threads=_THREADS, max_inflight_bytes=memory)
    tensors = [*content.tensors.values()]
    requests: list[Writable] = [_tensor_request(entry) for entry in tensors]
    requests += [_object_request(name, read) for name, read in content.objects.items()]
    policy = CompressionPolicy(options.compression)
    save_id = backend.begin_save(overwrite=options.overwrite)
    try:
        stored = policy.write(backend, requests, prefix="__0_", save_id=save_id)
        info = ManifestInfo(
            save_id=save_id,
            world_size=1,
            writer=f"dcp-format/{version('dcp-format')}",
            generation=backend.session.generation,
            created_ns=backend.session.created_ns(),
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


def stored_content(store: Store, index: CheckpointIndex) -> Content:
    """Return the `Content` of a checkpoint. Raises UnsupportedValueError if it has values of single ranks."""
    _check_owners(index, store.url)
    problems = coverage_problems(index)
    if problems:
        name, sentence = problems[0]
        raise CorruptCheckpointError(f"{sentence}; the checkpoint in {store.url} is incomplete", key=name)
    reader = DecodingReader(store)
    if index.chunk_items is None and index.tensor_names:
        raise CorruptCheckpointError("the index does not say where values are stored", key=index.tensor_names[0])
    stored = [*stored_tensors(index)]
    tensors = {each.name: _entry(reader, each) for each in stored}
    reader.prepare([chunk for each in stored for chunk in each.chunks if chunk.nbytes])
    names = index.tensor_names
    targets = [names[row] for row in index.alias_targets.tolist()]
    return Content(
        url=store.url,
        tensors=tensors,
        objects={name: functools.partial(reader.object, name, item) for name, item in stored_objects(index)},
        aliases=dict(zip(index.alias_names, targets, strict=True)),
        paths=index.paths,
    )


def _check_owners(index: CheckpointIndex, url: str) -> None:
    owned = [name for name, owner in zip(index.tensor_names, index.tensor_owner.tolist(), strict=True) if owner]
    owned += [name for name, owner in zip(index.object_names, index.object_owner.tolist(), strict=True) if owner]
    if owned:
        raise UnsupportedValueError(
            f"{url} holds values of single ranks, such as {sorted(set(owned))[:4]}: other formats have no place for "
            "one value per rank; load them with dcp_core.PerRank, and save a checkpoint without them to convert"
        )


def _entry(reader: DecodingReader, tensor: StoredTensor) -> TensorEntry:
    data = reader.tensor(tensor.dtype, tensor.shape, tensor.chunks)
    flags = TensorFlags.from_bits(tensor.flags)
    return TensorEntry(tensor.name, tensor.dtype, tensor.shape, data, flags.requires_grad)

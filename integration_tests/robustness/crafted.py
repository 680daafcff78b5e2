"""Checkpoints as an attacker would write them: every checksum is right, the contents are not."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import resource
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import dcp_all as dcp
from dcp_io import LocalStore
from dcp_manifest.file.blob import pack
from dcp_manifest.file.manifest_read import read_index
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import CheckpointIndex

__all__ = [
    "METADATA",
    "archive",
    "edited_columns",
    "edited_index",
    "little_memory",
    "ours_with_object",
    "saved",
    "stock_checkpoint",
    "stock_index",
    "with_chunk",
]

METADATA = ".metadata"
Chunk = tuple[tuple[int, ...], tuple[int, ...]]
Place = tuple[str, int, int]


def archive(pickled: bytes, records: Mapping[str, bytes] | None = None) -> bytes:
    """What `torch.save` writes, with another pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
        for name, data in (records or {}).items():
            file.writestr(f"archive/{name}", data)
    return buffer.getvalue()


class _Smuggler(dcp.DefaultSavePlanner):
    """Saves chosen bytes in place of an object's."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return io.BytesIO(self._data) if isinstance(found, io.BytesIO) else found


def ours_with_object(folder: Path, payload: bytes, **options: Any) -> None:
    """A checkpoint of ours with a tensor `t` and an object `o` of which the payload is given."""
    writer = dcp.FileSystemWriter(folder, **options)
    state = {"t": torch.arange(6.0), "o": "harmless"}
    dcp.save(state, storage_writer=writer, planner=_Smuggler(payload), no_dist=True)


def edited_index(folder: Path, edit: Callable[[CheckpointIndex], CheckpointIndex]) -> None:
    """Write the index anew after an edit, without any of the checks of a writer."""
    store = LocalStore(folder)
    index = edit(read_index(store.read(METADATA), file=METADATA))
    with contextlib.ExitStack() as patches:
        for check in ("check_index", "check_relative_path"):
            patches.enter_context(mock.patch(f"dcp_manifest.file.manifest_write.{check}", return_value=None))
        store.publish(METADATA, encode(index, interop=False))


def edited_columns(folder: Path, columns: Mapping[str, Any]) -> None:
    """Write the index anew with other numbers in some columns of the manifest, whatever they are."""

    def pack_edited(own: Mapping[str, Any], metadata: Mapping[str, Any], **room: int) -> tuple[bytearray, int]:
        return pack({**own, **{name: np.array(values) for name, values in columns.items()}}, metadata, **room)

    with mock.patch("dcp_manifest.file.manifest_write.pack", pack_edited):
        edited_index(folder, lambda index: index)


def stock_index(
    folder: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], list[Chunk]]],
    objects: list[str],
    places: Mapping[tuple[str, tuple[int, ...] | None], Place],
) -> None:
    """An index in stock's own words: tensors are name → shape and chunks (offsets, sizes), all float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.checkpoint import filesystem, metadata

    entries: dict[str, Any] = {name: metadata.BytesStorageMetadata() for name in objects}
    for name, (shape, chunks) in tensors.items():
        boxes = [metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
        entries[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=torch.float32), torch.Size(shape), boxes
        )
    storage = {
        metadata.MetadataIndex(name, None if offset is None else torch.Size(offset)): filesystem._StorageInfo(*place)
        for (name, offset), place in places.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    index = metadata.Metadata(state_dict_metadata=entries, storage_data=storage)
    (folder / METADATA).write_bytes(pickle.dumps(index))


def stock_checkpoint(folder: Path, tensor: bytes, item: bytes) -> None:
    """A checkpoint of stock's with a tensor `t` of six numbers and an object `o`, whose payloads are given."""
    stock_index(
        folder,
        {"t": ((6,), [((0,), (6,))])},
        ["o"],
        {("t", (0,)): ("data.distcp", 0, len(tensor)), ("o", None): ("data.distcp", len(tensor), len(item))},
    )
    (folder / "data.distcp").write_bytes(tensor + item)


def saved(value: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def with_chunk(index: CheckpointIndex, **columns: Any) -> CheckpointIndex:
    """The index with other values in the first row of chunk items."""
    assert index.chunk_items is not None
    changed = {}
    for name, value in columns.items():
        column = getattr(index.chunk_items, name).copy()
        column[0] = value
        changed[name] = column
    return replace(index, chunk_items=replace(index.chunk_items, **changed))


@contextlib.contextmanager
def little_memory(more_bytes: int = 1 << 30) -> Iterator[None]:
    """In the body this process can map little more memory than it has: huge allocations fail, used or not."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

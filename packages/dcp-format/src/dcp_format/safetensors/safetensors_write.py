"""Conversion of a `Content` to safetensors: one file, or a Hugging Face folder of several files with an index."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dcp_base.logs import library_logger
from dcp_base.schemes import file_path
from dcp_core.objects.object_bytes import load_object
from dcp_format.content.content import Content, TensorEntry, WriteOptions, refuse_objects, ticking
from dcp_format.content.new_file import aborting, give_name, new_file, refuse_existing, sweep, temporary_name
from dcp_format.safetensors.complete_set import (
    SUFFIX,
    Stamp,
    fresh_name,
    is_writers_file,
    is_writers_name,
    split_by_size,
)
from dcp_format.safetensors.safetensors_header import build_header
from dcp_format.safetensors.safetensors_index import ALIASES, INDEX_NAME, earlier_files, index_json, shard_names
from dcp_io import LocalStore, Sink
from dcp_manifest.index.dtypes import ITEM_BYTES

_log = library_logger(__name__)

OBJECTS_NAME = "objects.pt"
"""Name of the `torch.save` file of objects in a folder; next to a single file `NAME.safetensors`, `NAME.objects.pt`."""


def write_safetensors(content: Content, path: str | os.PathLike[str], options: WriteOptions) -> None:
    """Write one safetensors file if `path` ends in `.safetensors`, else a folder that Hugging Face libraries open.

    A tensor with several names is written under each of them, and the file's metadata records that they are one tensor.
    With `options.objects="sidecar"`, the file of objects gets its final name right after the tensors' file. An error
    leaves existing files unchanged.
    """
    objects = options.objects
    if objects not in ("refuse", "sidecar", "skip"):
        raise ValueError(f"objects={objects!r} is not known; choose 'refuse', 'sidecar' or 'skip'")
    place = Path(file_path(path))
    if objects == "refuse":
        refuse_objects(content.objects, "safetensors")
    entries = _entries(ticking(content, options.tick))
    metadata = {"format": "pt"}
    if content.aliases:
        metadata[ALIASES] = json.dumps(content.aliases)
    with _sidecar(content if objects == "sidecar" else None, place, overwrite=options.overwrite):
        if place.suffix == SUFFIX:
            with new_file(place, overwrite=options.overwrite) as sink:
                write_tensor_file(sink, entries, metadata, max_inflight_bytes=options.max_inflight_bytes)
        else:
            groups = split_by_size(entries, options.max_file_bytes, lambda entry: entry.data.nbytes)
            files = dict(zip(shard_names(len(groups)), groups, strict=True))
            _write_folder(place, files, metadata, options.max_inflight_bytes, overwrite=options.overwrite)


@contextlib.contextmanager
def _sidecar(content: Content | None, place: Path, *, overwrite: bool) -> Iterator[None]:
    """Write the objects to a file next to the tensors' file, and publish it after that file."""
    if content is None or not content.objects:
        yield
        return
    values: dict[str, Any] = {name: load_object(read(), key=name) for name, read in content.objects.items()}
    buffer = io.BytesIO()
    torch.save(values, buffer)
    path = place.with_suffix(f".{OBJECTS_NAME}") if place.suffix == SUFFIX else place / OBJECTS_NAME
    with new_file(path, overwrite=overwrite) as sink:
        sink.write([buffer.getbuffer()])
        yield


def _entries(content: Content) -> list[TensorEntry]:
    entries = [*content.tensors.values()]
    for alias, target in content.aliases.items():
        original = content.tensors[target]
        entries.append(TensorEntry(alias, original.dtype, original.shape, original.data))
    return entries


def write_tensor_file(
    sink: Sink, entries: Sequence[TensorEntry], metadata: Mapping[str, str], *, max_inflight_bytes: int
) -> None:
    """Write one safetensors file, larger element sizes first for alignment."""
    ordered = sorted(entries, key=lambda entry: -ITEM_BYTES[entry.dtype])
    sink.write([build_header([(entry.name, entry.dtype, entry.shape) for entry in ordered], metadata)])
    for entry in ordered:
        for piece in entry.data.pieces(max_inflight_bytes):
            sink.write([piece])


def _write_folder(
    folder: Path,
    files: Mapping[str, Sequence[TensorEntry]],
    metadata: Mapping[str, str],
    max_inflight_bytes: int,
    *,
    overwrite: bool,
) -> None:
    """Write and rename all files, publish the index, then remove an older set, none of whose names a new file gets."""
    _check_folder(folder, files, overwrite=overwrite)
    store = LocalStore(folder)
    store.make()
    tag = secrets.token_hex(8)
    earlier = earlier_files(folder)
    indexed = store.exists(INDEX_NAME)
    alone = len(files) == 1 and earlier <= files.keys() and not indexed  # one file replaces one file, in one step
    if not alone:
        files = {fresh_name(name, earlier, tag): entries for name, entries in files.items()}
    sweep(store, is_writers_name)
    temporary = {name: temporary_name(name) for name in files}
    stamped = {**metadata, **Stamp.next(folder, tag, len(files)).metadata}
    named: list[str] = []
    try:
        for name, entries in files.items():
            sink = store.create(temporary[name])
            with aborting(sink):
                write_tensor_file(sink, entries, stamped, max_inflight_bytes=max_inflight_bytes)
                sink.close()
        for name in files:
            give_name(folder / temporary[name], folder / name, overwrite=overwrite)
            named.append(name)
        store.sync_folder()
    except BaseException:
        for name in [*temporary.values(), *([] if alone else named)]:
            store.delete(name)
        raise
    others = {path.name for path in folder.glob(f"*{SUFFIX}")} - files.keys()
    if indexed or len(files) > 1 or others:
        sizes = {name: [(entry.name, entry.data.nbytes) for entry in entries] for name, entries in files.items()}
        store.publish(INDEX_NAME, index_json(sizes))
    remove_earlier(store, earlier - files.keys())


def remove_earlier(store: LocalStore, names: Iterable[str]) -> None:
    """Remove the files of older saves. Files that no save wrote are kept, even if an index names them."""
    sizes = {entry.name: entry.bytes for entry in store.list()}
    for name in sorted({*names} & sizes.keys()):
        if is_writers_file(store, name, sizes[name]):
            store.delete(name)
        else:
            _log.warning("%r in %s stays: it is not a file that a save of tensors made", name, store.url)
    store.sync_folder()


def _check_folder(folder: Path, files: Mapping[str, Sequence[TensorEntry]], *, overwrite: bool) -> None:
    for old in (*folder.glob(f"*{SUFFIX}"), folder / INDEX_NAME):
        refuse_existing(old, overwrite=overwrite)
    for entries in files.values():
        build_header([(entry.name, entry.dtype, entry.shape) for entry in entries])

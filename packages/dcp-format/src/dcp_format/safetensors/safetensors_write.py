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
from dcp_format.content.new_file import give_name, new_file, refuse_existing, sweep, temporary_name
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
from dcp_io import LocalStore, Sink, Store
from dcp_manifest.index.dtypes import ITEM_BYTES

_log = library_logger(__name__)

Sizes = Mapping[str, Sequence[tuple[str, int]]]
"""File → its tensors, by name, with their sizes in bytes."""
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
            _write_folder(place, groups, metadata, options.max_inflight_bytes, overwrite=options.overwrite)


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


def sizes_of(files: Mapping[str, Sequence[TensorEntry]]) -> Sizes:
    """Return the sizes for a folder's index."""
    return {name: [(entry.name, entry.data.nbytes) for entry in entries] for name, entries in files.items()}


def _write_folder(
    folder: Path,
    groups: Sequence[Sequence[TensorEntry]],
    metadata: Mapping[str, str],
    max_inflight_bytes: int,
    *,
    overwrite: bool,
) -> None:
    for old in (*folder.glob(f"*{SUFFIX}"), folder / INDEX_NAME):
        refuse_existing(old, overwrite=overwrite)
    for entries in groups:
        build_header([(entry.name, entry.dtype, entry.shape) for entry in entries])
    store = LocalStore(folder)
    store.make()
    tag = secrets.token_hex(8)
    names, indexed = choose_names(store, shard_names(len(groups)), tag)
    files = dict(zip(names, groups, strict=True))
    sweep(store, is_writers_name)
    temporary = {name: temporary_name(name) for name in files}
    stamped = {**metadata, **Stamp.next(folder, tag, len(files)).metadata}
    try:
        for name, entries in files.items():
            with store.create(temporary[name]) as sink:
                write_tensor_file(sink, entries, stamped, max_inflight_bytes=max_inflight_bytes)
        publish_files(store, temporary, sizes_of(files) if indexed else None, overwrite=overwrite)
    except BaseException:
        for name in temporary.values():
            store.delete(name)
        raise


def choose_names(
    store: Store, wanted: Sequence[str], tag: str, *, always_indexed: bool = False
) -> tuple[Sequence[str], bool]:
    """Return names that no file of the folder has, and whether the folder needs an index.

    It needs none if a local file replaces the only file, or nothing, in one rename: that file keeps its name.
    """
    present = {entry.name for entry in store.list() if entry.name.endswith(SUFFIX)}
    if isinstance(store, LocalStore) and not always_indexed and len(wanted) == 1 and present <= {*wanted}:
        return wanted, False
    indexed = always_indexed or len(wanted) > 1 or bool(present) or store.exists(INDEX_NAME)
    return [fresh_name(name, present, tag) for name in wanted], indexed


def publish_files(
    store: LocalStore, temporary: Mapping[str, str], sizes: Sizes | None, *, overwrite: bool = True
) -> None:
    """Give complete files their names (name → temporary name), write the index, and remove an older save's files.

    Without `sizes` there is no index. An older save's files count until the new ones are complete.
    """
    folder = Path(store.path)
    earlier = earlier_files(folder)
    if sizes is None and earlier <= temporary.keys():
        # It names the one file that is replaced, which is complete without it.
        store.delete(INDEX_NAME)
        store.sync_folder()
    named: set[str] = set()
    try:
        for name, place in temporary.items():
            give_name(folder / place, folder / name, overwrite=overwrite)
            named.add(name)
        store.sync_folder()
    except BaseException:
        for name in named - earlier:
            store.delete(name)
        raise
    if sizes is not None:
        store.publish(INDEX_NAME, index_json(sizes))
    else:
        store.delete(INDEX_NAME)  # of an older save, whose files counted until now
        store.sync_folder()
    _remove(store, earlier - temporary.keys())


def _remove(store: LocalStore, names: Iterable[str]) -> None:
    """Files that no save wrote are kept, even if an index names them."""
    sizes = {entry.name: entry.bytes for entry in store.list()}
    for name in sorted({*names} & sizes.keys()):
        if is_writers_file(store, name, sizes[name]):
            store.delete(name)
        else:
            _log.warning("%r in %s stays: it is not a file that a save of tensors made", name, store.url)
    store.sync_folder()

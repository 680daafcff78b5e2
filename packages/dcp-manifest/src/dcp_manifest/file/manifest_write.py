"""Writer of a manifest: makes columns and metadata from an index, as `docs/format.md` describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_manifest.container.blob import narrow, pack
from dcp_manifest.container.strings import pack_strings
from dcp_manifest.errors import InvalidIndexError
from dcp_manifest.file.path_table import pack_paths
from dcp_manifest.index.box_columns import BoxLayout, distinct, starts
from dcp_manifest.index.columns import CheckpointIndex, ItemColumns, ManifestInfo
from dcp_manifest.index.consistency import MAX_NUMBERS_PER_BYTE, check_index, derived_bytes
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.items import Framing
from dcp_manifest.index.relative_paths import check_relative_path

__all__ = ["path_names", "write_manifest"]

Numbers = npt.NDArray[Any]


def write_manifest(index: CheckpointIndex) -> bytes:
    """Write the manifest of an index; equal indexes give equal bytes.

    Raises:
        InvalidIndexError: The index is inconsistent (see `check_index`), or has no `info`.
        UnsafeCheckpointError: A data file's name leads out of the checkpoint's folder.
    """
    if index.info is None:
        raise InvalidIndexError("an index without info cannot be written: set CheckpointIndex.info to a ManifestInfo")
    for path in index.files:
        check_relative_path(path, file="the index to be written")
    try:
        check_index(index)
        columns = _Columns()
        _add_tables(columns, index)
        _add_tensors(columns, index)
        _add_items(columns, index)
        _add_paths(columns, index)
    except (ValueError, IndexError) as error:
        raise InvalidIndexError(f"the index cannot be written: {error}") from error
    tables = {"chunk": index.chunk_items, "object": index.object_items}
    stored = [name for name, items in tables.items() if items is not None]
    manifest = pack(columns.narrow, {"info": _info(index.info), "rows": columns.rows, "stored": stored})
    numbers = max(len(index.chunk_offsets), len(index.tensor_shape))
    if max(columns.rows.values()) > len(manifest) or numbers > len(manifest) * MAX_NUMBERS_PER_BYTE:
        raise InvalidIndexError("the index cannot be written: it has more equal rows than readers accept")
    return manifest


class _Columns:
    """Builder of the columns; counts the rows of each table."""

    def __init__(self) -> None:
        self.narrow: dict[str, Numbers] = {}
        self.rows: dict[str, int] = {}

    def add(self, name: str, values: Numbers, *, collapse: bool = True) -> None:
        self.narrow[name] = narrow(values, collapse=collapse)

    def strings(self, name: str, strings: Sequence[str]) -> None:
        text, lengths = pack_strings(strings)
        self.narrow[f"{name}.text"] = text
        self.add(f"{name}.bytes", lengths)


def _info(info: ManifestInfo) -> Mapping[str, Any]:
    return {
        "created_ns": info.created_ns,
        "generation": info.generation,
        "rank": info.rank,
        "save_id": info.save_id,
        "user": [list(pair) for pair in info.user],
        "world_size": info.world_size,
        "writer": info.writer,
    }


def _add_tables(columns: _Columns, index: CheckpointIndex) -> None:
    columns.rows.update(dtype=len(index.dtypes), file=len(index.files), chain=len(index.chains))
    columns.strings("dtype", index.dtypes)
    columns.add("dtype.item_bytes", np.array([ITEM_BYTES.get(dtype, 0) for dtype in index.dtypes], np.int64))
    columns.strings("file", index.files)
    columns.add("chain.links", np.array([len(chain) for chain in index.chains], np.int64))
    links = [link for chain in index.chains for link in chain]
    columns.rows["link"] = len(links)
    columns.strings("link", links)


def _add_tensors(columns: _Columns, index: CheckpointIndex) -> None:
    columns.rows.update(tensor=len(index.tensor_names), chunk=int(index.tensor_chunks.sum()))
    columns.strings("tensor.name", index.tensor_names)
    columns.add("tensor.dtype", index.tensor_dtype)
    columns.add("tensor.flags", index.tensor_flags)
    columns.add("tensor.ndim", index.tensor_ndim)
    columns.add("tensor.owner", index.tensor_owner)
    columns.add("tensor.shape", index.tensor_shape)
    columns.add("tensor.chunks", index.tensor_chunks)
    layout = BoxLayout(np.repeat(index.tensor_ndim, index.tensor_chunks))
    for dim in range(layout.dims):
        columns.add(f"chunk.offset.{dim}", index.chunk_offsets[layout.places(dim)])
        columns.add(f"chunk.size.{dim}", index.chunk_sizes[layout.places(dim)])
    columns.rows["alias"] = len(index.alias_names)
    columns.strings("alias.name", index.alias_names)
    columns.add("alias.target", index.alias_targets)


def _add_items(columns: _Columns, index: CheckpointIndex) -> None:
    columns.rows["object"] = len(index.object_names)
    columns.strings("object.name", index.object_names)
    columns.add("object.owner", index.object_owner)
    chunks, objects = index.chunk_items, index.object_items
    tables = [_frames(items) for items in (chunks, objects) if items is not None]
    frames = distinct(np.concatenate([np.zeros(0, np.uint64), *tables]))
    columns.rows["frame"] = len(frames)
    columns.add("frame.lead", frames >> np.uint64(32))
    columns.add("frame.trail", frames & np.uint64(0xFFFFFFFF))
    if chunks is not None:
        _add_item_columns(columns, "chunk", chunks, frames)
        _add_counts(columns, index, "tensor.running", chunks.running_counts())
        if chunks.blocks is not None:
            _add_counts(columns, index, "tensor.blocks", chunks.blocks.counts)
            columns.add("chunk.blocks", chunks.blocks.counts)
            columns.add("chunk.block_bytes", chunks.blocks.block_bytes)
            columns.add("block.bytes", chunks.blocks.lengths, collapse=False)
            columns.narrow["block.crc32"] = chunks.blocks.crcs.astype(np.uint32)
        derived = derived_bytes(index)
        plain = (chunks.framing == Framing.RAW) & (chunks.chain == 0) & (derived >= 0)
        if not plain.all():
            columns.add("chunk.stored_bytes", chunks.stored_bytes)
    if objects is not None:
        _add_item_columns(columns, "object", objects, frames)
        columns.add("object.stored_bytes", objects.stored_bytes)


def _frames(items: ItemColumns) -> npt.NDArray[np.uint64]:
    trail = items.length - items.lead - items.stored_bytes
    if len(trail) and int(trail.max()) >= 1 << 32:
        raise ValueError("an item has 4 GiB or more after its stored range")
    frames: npt.NDArray[np.uint64] = items.lead.astype(np.uint64) << np.uint64(32) | trail
    return frames


def _add_item_columns(columns: _Columns, table: str, items: ItemColumns, frames: npt.NDArray[np.uint64]) -> None:
    columns.add(f"{table}.file", items.file)
    columns.add(f"{table}.position", items.offset)
    columns.add(f"{table}.frame", np.searchsorted(frames, _frames(items)))
    columns.add(f"{table}.framing", items.framing)
    columns.add(f"{table}.chain", items.chain)
    columns.add(f"{table}.checked", items.checked)
    columns.add(f"{table}.crc32", items.crc32)
    columns.narrow[f"{table}.running"] = items.running_crcs.astype(np.uint32)


def _add_counts(columns: _Columns, index: CheckpointIndex, name: str, counts: Numbers) -> None:
    """Add, for each tensor, the sum of its chunks' counts, by which a single tensor is found without the others."""
    columns.add(name, np.diff(starts(counts)[starts(index.tensor_chunks)]))


def _add_paths(columns: _Columns, index: CheckpointIndex) -> None:
    if index.paths is None:
        return
    names = path_names(index.tensor_names, index.object_names, index.alias_names)
    known = set(names)
    own_names = not known.issuperset(index.paths) or not all(index.paths.values())
    if own_names:
        names = list(index.paths)
        columns.strings("path.name", names)
    packed = pack_paths(names, index.paths)
    columns.rows["path"] = len(names)
    columns.add("path.elements", packed.elements)
    columns.rows["separator"] = len(packed.element_bytes)
    columns.add("path.element_bytes", packed.element_bytes)
    columns.rows["element"] = len(packed.kinds)
    columns.add("path.kind", packed.kinds)
    if packed.texts is not None:
        columns.strings("path.text", packed.texts)


def path_names(*tables: Sequence[str]) -> list[str]:
    """Return the names that a path table refers to if it stores none: those in `tables`, in order, without repeats."""
    return list(dict.fromkeys(name for table in tables for name in table))

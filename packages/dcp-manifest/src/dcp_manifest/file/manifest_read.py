"""Reader of a manifest: makes an index from the manifest's columns and metadata, which `docs/format.md` describes.

All columns are read through a `Blob`, so the same code serves whole checkpoints and single tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dcp_manifest.container.blob import Blob, Unsigned
from dcp_manifest.container.strings import unpack_strings
from dcp_manifest.file.manifest_write import path_names
from dcp_manifest.file.path_table import PathColumns, unpack_paths
from dcp_manifest.index.box_columns import BoxLayout, starts
from dcp_manifest.index.columns import BlockColumns, CheckpointIndex, ItemColumns, ManifestInfo, PathElement
from dcp_manifest.index.consistency import MAX_NDIM, MAX_NUMBERS_PER_BYTE

__all__ = ["ManifestReader", "TensorTable"]

I64 = npt.NDArray[np.int64]
N = TypeVar("N", bound=np.integer[Any])
F = TypeVar("F", str, int)


class TensorTable(NamedTuple):
    """Table of all tensors in a manifest, as columns."""

    names: list[str]
    dtype: npt.NDArray[np.uint8]
    flags: npt.NDArray[np.uint8]
    ndim: npt.NDArray[np.uint8]
    owner: npt.NDArray[np.uint32]
    shape: I64
    chunks: I64


class ManifestReader:
    """Reader that makes indexes from a manifest.

    Every method raises ValueError or TypeError, with a sentence as the message, if columns contradict each other;
    `check_index` finds the remaining contradictions. The memory of each table is at most a constant multiple of the
    manifest's length.

    Args:
        blob: Container of the manifest.
    """

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        self._rows = _object(blob.header.metadata, "rows")
        stored = blob.header.metadata.get("stored")
        if not isinstance(stored, list):
            raise TypeError("the manifest does not say which values are stored")
        self._stored = stored
        self._limit = blob.header.data_start + blob.header.data_bytes

    def info(self) -> ManifestInfo:
        """Return the facts about the whole checkpoint (`ManifestInfo`)."""
        facts = _object(self.blob.header.metadata, "info")
        rank, user = facts.get("rank"), facts.get("user")
        if not (rank is None or type(rank) is int):
            raise TypeError(f"the manifest's rank is {rank!r}")
        if not (isinstance(user, list) and all(_is_pair(pair) for pair in user)):
            raise TypeError("the manifest's user metadata is not a list of pairs of strings")
        return ManifestInfo(
            save_id=_fact(facts, "save_id", str),
            world_size=_fact(facts, "world_size", int),
            writer=_fact(facts, "writer", str),
            generation=_fact(facts, "generation", int),
            rank=rank,
            created_ns=_fact(facts, "created_ns", int),
            user=tuple((key, value) for key, value in user),
        )

    def count(self, table: str) -> int:
        """Return the number of rows in a table of the manifest, such as `tensor` or `chunk`."""
        count = self._rows.get(table, 0)
        if type(count) is not int or not 0 <= count <= self._limit:
            raise ValueError(f"a manifest of {self._limit} bytes cannot have {count!r} rows of {table}")
        return count

    def has(self, name: str) -> bool:
        """Whether the manifest has a column of that name."""
        return name in self.blob.header.columns

    def rows(self, name: str, total: int, dtype: type[N], start: int = 0, stop: int | None = None) -> npt.NDArray[N]:
        """Return rows [start, stop) of a column with `total` rows, converted to `dtype`; `stop` None is `total`."""
        column = self.blob.header.columns.get(name)
        if column is None:
            raise ValueError(f"the column {name} is missing")
        stop = total if stop is None else stop
        if total > self._limit * MAX_NUMBERS_PER_BYTE:
            raise ValueError(f"a manifest of {self._limit} bytes cannot have {total} numbers in {name}")
        if column.count == 1 and total > 1:
            return _converted(np.repeat(self.blob.read(name, 0, 1), stop - start), name, dtype)
        if column.count != total:
            raise ValueError(f"the column {name} has {column.count} rows, not {total}")
        return _converted(self.blob.read(name, start, stop), name, dtype)

    def strings(self, table: str, name: str) -> list[str]:
        """Return the strings in the columns `<name>.text` and `<name>.bytes`.

        Args:
            table: Name of the table, which determines the number of strings.
            name: Name of the strings, such as `tensor.name`.
        """
        column = self.blob.header.columns.get(f"{name}.text")
        if column is None or column.dtype != "<u1":
            raise ValueError(f"the column {name}.text is missing")
        lengths = self.rows(f"{name}.bytes", self.count(table), np.int64)
        try:
            return unpack_strings(self.blob.read(f"{name}.text", 0, column.count).astype(np.uint8), lengths)
        except ValueError as error:
            raise ValueError(f"the table {name} is damaged: {error}") from error

    def tables(self) -> CheckpointIndex:
        """Return an index that has only the tables of dtypes, files and transform chains, and `info`."""
        links = self.strings("link", "link")
        counts = self.rows("chain.links", self.count("chain"), np.int64)
        if not _add_up(counts, len(links)):
            raise ValueError("the table of transforms does not match the chains")
        ends = starts(counts).tolist()
        return CheckpointIndex(
            dtypes=tuple(self.strings("dtype", "dtype")),
            files=tuple(self.strings("file", "file")),
            chains=tuple(tuple(links[start:end]) for start, end in pairwise(ends)),
            info=self.info(),
        )

    def tensors(self) -> TensorTable:
        """Return the table of all tensors."""
        count = self.count("tensor")
        ndim = self.rows("tensor.ndim", count, np.uint8)
        if count and int(ndim.max()) > MAX_NDIM:
            raise ValueError(f"a tensor has more than {MAX_NDIM} dimensions")
        chunks = self.rows("tensor.chunks", count, np.int64)
        total = self.count("chunk")
        if not _add_up(chunks, total):
            raise ValueError(f"the tensors do not have {total} chunks")
        return TensorTable(
            names=self.strings("tensor", "tensor.name"),
            dtype=self.rows("tensor.dtype", count, np.uint8),
            flags=self.rows("tensor.flags", count, np.uint8),
            ndim=ndim,
            owner=self.rows("tensor.owner", count, np.uint32),
            shape=self.rows("tensor.shape", int(ndim.sum(dtype=np.int64)), np.int64),
            chunks=chunks,
        )

    def whole(self) -> CheckpointIndex:
        """Return the index of the whole checkpoint."""
        index = self.tables()
        tensors = self.tensors()
        self.put_chunks(index, tensors, 0, len(tensors.names))
        objects = self.count("object")
        index.object_names = self.strings("object", "object.name")
        index.object_owner = self.rows("object.owner", objects, np.uint32)
        if "object" in self._stored:
            stored = self.rows("object.stored_bytes", objects, np.uint64)
            running = self.blob.header.columns.get("object.running")
            index.object_items = self._items(
                "object", objects, 0, objects, stored, (0, running.count if running else 0)
            )
        index.alias_names, index.alias_targets = self.aliases()
        index.paths = self.paths(path_names(index.tensor_names, index.object_names, index.alias_names))
        return index

    def aliases(self) -> tuple[list[str], npt.NDArray[np.uint32]]:
        """Return the names of all aliases, and for each the row of its tensor."""
        return self.strings("alias", "alias.name"), self.rows("alias.target", self.count("alias"), np.uint32)

    def put_chunks(self, index: CheckpointIndex, tensors: TensorTable, start: int, stop: int) -> None:
        """Set the tensors of `index` to rows [start, stop) of the table of tensors, with their chunks."""
        shapes = starts(tensors.ndim)
        rows = slice(start, stop)
        index.tensor_names = tensors.names[rows]
        index.tensor_dtype, index.tensor_flags = tensors.dtype[rows], tensors.flags[rows]
        index.tensor_ndim, index.tensor_owner = tensors.ndim[rows], tensors.owner[rows]
        index.tensor_shape = tensors.shape[shapes[start] : shapes[stop]]
        index.tensor_chunks = tensors.chunks[rows]
        self._put_boxes(index, tensors, start, stop)
        if "chunk" in self._stored:
            chunks = starts(tensors.chunks)
            total, first, last = int(chunks[-1]), int(chunks[start]), int(chunks[stop])
            running = starts(self.rows("tensor.running", len(tensors.names), np.int64))
            stored = self._stored_bytes(index, total, first, last)
            place = int(running[start]), int(running[stop])
            index.chunk_items = self._items("chunk", total, first, last, stored, place)
            if self.has("chunk.blocks"):
                blocks = starts(self.rows("tensor.blocks", len(tensors.names), np.int64))
                place = int(blocks[start]), int(blocks[stop])
                index.chunk_items.blocks = self._blocks(total, first, last, place)

    def _put_boxes(self, index: CheckpointIndex, tensors: TensorTable, start: int, stop: int) -> None:
        layout = BoxLayout(np.repeat(index.tensor_ndim, index.tensor_chunks))
        if layout.numbers > self._limit * MAX_NUMBERS_PER_BYTE:
            raise ValueError(f"a manifest of {self._limit} bytes cannot have {layout.numbers} offsets")
        index.chunk_offsets = np.empty(layout.numbers, np.int64)
        index.chunk_sizes = np.empty(layout.numbers, np.int64)
        for dim in range(layout.dims):
            deep = starts(tensors.chunks * (tensors.ndim > dim))
            part = int(deep[-1]), np.int64, int(deep[start]), int(deep[stop])
            index.chunk_offsets[layout.places(dim)] = self.rows(f"chunk.offset.{dim}", *part)
            index.chunk_sizes[layout.places(dim)] = self.rows(f"chunk.size.{dim}", *part)

    def _stored_bytes(self, index: CheckpointIndex, total: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
        if self.has("chunk.stored_bytes"):
            return self.rows("chunk.stored_bytes", total, np.uint64, start, stop)
        item_bytes = self.rows("dtype.item_bytes", len(index.dtypes), np.int64)
        if len(index.tensor_dtype) and int(index.tensor_dtype.max()) >= len(item_bytes):
            raise ValueError("a tensor's dtype is not in the table")
        if len(item_bytes) and int(item_bytes.max()) > 1024:
            raise ValueError("an element has more than 1,024 bytes")
        volumes = BoxLayout(np.repeat(index.tensor_ndim, index.tensor_chunks)).volumes(index.chunk_sizes)
        if len(volumes) and int(volumes.max()) >= 1 << 52:
            raise ValueError("a chunk has more elements than any memory")
        per_chunk = np.repeat(item_bytes[index.tensor_dtype], index.tensor_chunks)
        stored: npt.NDArray[np.uint64] = (volumes * per_chunk).astype(np.uint64)
        return stored

    def _items(
        self,
        table: str,
        total: int,
        start: int,
        stop: int,
        stored_bytes: npt.NDArray[np.uint64],
        running: tuple[int, int],
    ) -> ItemColumns:
        def rows(name: str, dtype: type[N]) -> npt.NDArray[N]:
            return self.rows(f"{table}.{name}", total, dtype, start, stop)

        frame = rows("frame", np.int64)
        leads = self.rows("frame.lead", self.count("frame"), np.uint32)
        trails = self.rows("frame.trail", self.count("frame"), np.uint64)
        if len(frame) and int(frame.max()) >= len(leads):
            raise ValueError(f"the frame of a {table} is not in the table")
        if len(stored_bytes) and int(stored_bytes.max()) >= 1 << 62:
            raise ValueError(f"the offset of a {table} is larger than any file")
        return ItemColumns(
            file=rows("file", np.uint32),
            offset=rows("position", np.uint64),
            length=leads[frame] + stored_bytes + trails[frame],
            lead=leads[frame],
            stored_bytes=stored_bytes,
            framing=rows("framing", np.uint8),
            chain=rows("chain", np.uint8),
            checked=rows("checked", np.uint8),
            crc32=rows("crc32", np.uint32),
            running_crcs=self._part(f"{table}.running", *running),
        )

    def _blocks(self, total: int, start: int, stop: int, blocks: tuple[int, int]) -> BlockColumns | None:
        counts = self.rows("chunk.blocks", total, np.uint32, start, stop)
        if not counts.any():
            return None
        return BlockColumns(
            counts=counts,
            block_bytes=self.rows("chunk.block_bytes", total, np.uint32, start, stop),
            lengths=self._part("block.bytes", *blocks),
            crcs=self._part("block.crc32", *blocks),
        )

    def _part(self, name: str, start: int, stop: int) -> npt.NDArray[np.uint32]:
        """Return rows of a column whose length is not that of a table."""
        column = self.blob.header.columns.get(name)
        if column is None or not 0 <= start <= stop <= column.count:
            raise ValueError(f"the column {name} does not have the rows that the tables ask for")
        return _converted(self.blob.read(name, start, stop), name, np.uint32)

    def paths(self, names: list[str]) -> dict[str, tuple[PathElement, ...]] | None:
        """Return name → path in the nested state dict; None if the manifest has no paths.

        Args:
            names: Names that the paths belong to, if the table of paths has no names of its own.
        """
        if "path" not in self._rows:
            return None
        if self.has("path.name.bytes"):
            names = self.strings("path", "path.name")
        count = self.count("path")
        elements = self.rows("path.elements", count, np.int64)
        if len(names) != count:
            raise ValueError(f"there are {count} paths for {len(names)} names")
        kinds = self.rows("path.kind", self.count("element"), np.int64)
        separators = self.rows("path.element_bytes", self.count("separator"), np.int64)
        if not _add_up(elements, len(kinds)) or not _add_up(np.maximum(elements - 1, 0), len(separators)):
            raise ValueError("the lengths of the paths do not match their elements")
        texts = self.strings("path", "path.text") if self.has("path.text.bytes") else None
        paths = unpack_paths(names, PathColumns(elements, separators, kinds, texts))
        if self.has("path.name.bytes"):
            paths = {name: paths.get(name, ()) for name in names}
        return paths


def _add_up(counts: I64, total: int) -> bool:
    """Whether non-negative counts have this sum; False if the sum overflows 64 bits."""
    return total == (int(counts.sum()) if len(counts) and int(counts.max()) <= total else 0)


def _object(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = facts.get(name)
    if not isinstance(value, dict):
        raise TypeError(f"the manifest's metadata has no {name}")
    return value


def _fact(facts: Mapping[str, Any], name: str, kind: type[F]) -> F:
    value = facts.get(name)
    if type(value) is not kind:
        raise TypeError(f"the manifest's {name} is {value!r}")
    return value


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)


def _converted(values: Unsigned, name: str, dtype: type[N]) -> npt.NDArray[N]:
    """Convert numbers to another dtype. Raises ValueError if one does not fit."""
    top = int(values.max()) if len(values) else 0
    if top > np.iinfo(dtype).max:
        raise ValueError(f"the column {name} contains {top}, which is out of range")
    return values.astype(dtype)

"""Reader of `.metadata`: `[head][manifest][footer]`, see `docs/format.md`. Without a footer, the file is stock's."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any, AnyStr, TypeVar

import numpy as np
import numpy.typing as npt

from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.file.blob import (
    FOOTER_BYTES,
    UTF8,
    Blob,
    read_footer,
    unpack_strings,
)
from dcp_manifest.index.column_runs import ColumnRuns
from dcp_manifest.index.columns import (
    BlockColumns,
    BoxLayout,
    CheckpointIndex,
    ItemColumns,
    ManifestInfo,
    PathElement,
    starts,
)
from dcp_manifest.index.levels import by_tensor, level_borders
from dcp_manifest.index.literal_keys import LiteralKey
from dcp_manifest.index.schema import (
    ALIASES,
    BLOCKS,
    COLUMNS,
    ITEMS_OF,
    MAX_NUMBERS_PER_BYTE,
    OBJECTS,
    PATH_INT_KEY,
    PATH_KEY,
    PATH_LIST_INDEX,
    PATH_LITERAL_KEY,
    TABLES,
    TENSORS,
    Column,
    check_column,
    check_index,
    check_relative_path,
    derived_bytes,
)
from dcp_manifest.stock.stock_read import read_stock
from dcp_manifest.stock.stock_write import MARKER_MODULE, is_stub
from dcp_manifest.types import I64, U32, Buffer

N = TypeVar("N", bound=np.integer[Any])
_FACTS: Mapping[str, type] = {"save_id": str, "world_size": int, "writer": str, "generation": int, "created_ns": int}
_PATH_INDEX = re.compile(r"-?[0-9]{1,18}", re.ASCII)


def read_index(data: Buffer, *, file: str) -> CheckpointIndex:
    """Read an index file: from its manifest or, if stock wrote it, from its pickle. Runs no code from it.

    `data` is the whole file; messages name `file`.

    Raises:
        CorruptCheckpointError: The bytes are damaged, or the manifest of a file that this project wrote is missing.
        UnsupportedFormatError: A newer major version wrote the file.
        UnsafeCheckpointError: The pickle has a class or call that does not belong in an index, or the name of a data
            file leads out of the checkpoint's folder.
    """
    return IndexFile(data, file=file).read()


class IndexFile:
    """An index file's bytes; footer and manifest header are parsed once. Raises errors of `read_footer`."""

    def __init__(self, data: Buffer, *, file: str) -> None:
        self.file = file
        self.view = memoryview(data)
        self.footer = footer = read_footer(self.view[-FOOTER_BYTES:], size=len(self.view), file=file)
        self._manifest = self.view[footer.manifest_offset : -FOOTER_BYTES] if footer else memoryview(b"")

    @cached_property
    def blob(self) -> Blob:
        """The manifest; only its header has been checked."""
        return Blob(self._manifest, file=self.file)

    def read(self) -> CheckpointIndex:
        """Return the index; see `read_index`."""
        footer = self.footer
        if footer is None:
            return self._read_pickle()
        if zlib.crc32(self._manifest) != footer.manifest_crc32:
            raise CorruptCheckpointError(
                "the manifest is damaged; restore the file from a copy", file=self.file, offset=footer.manifest_offset
            )
        try:
            index = ManifestReader(self.blob).whole()
            check_index(index)
        except (ValueError, TypeError, IndexError) as error:
            if isinstance(error, CorruptCheckpointError):
                raise
            raise CorruptCheckpointError(f"the manifest is inconsistent: {error}", file=self.file) from error
        for path in index.files:
            check_relative_path(path, file=self.file)
        return index

    def _read_pickle(self) -> CheckpointIndex:
        if is_stub(self.view):
            raise CorruptCheckpointError("the file has lost its manifest; restore it from a copy", file=self.file)
        index, end, modules = read_stock(self.view, file=self.file)
        if MARKER_MODULE in modules or end != len(self.view):
            raise CorruptCheckpointError(
                "the index is followed by bytes that are not a valid manifest, or has lost its manifest, and is not "
                "read without it: restore the file from a copy",
                file=self.file,
                offset=end,
            )
        return index


class ManifestReader:
    """Makes indexes from a manifest; memory is at most a constant multiple of its length.

    Methods raise ValueError or TypeError if columns contradict each other; `check_index` finds other contradictions.
    """

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        self.columns = blob.header.columns
        self._rows = _object(blob.header.metadata, "rows")
        stored = blob.header.metadata.get("stored")
        if not isinstance(stored, list):
            raise TypeError("the manifest does not say which values are stored")
        self._stored = stored
        self._limit = blob.header.data_start + blob.header.data_bytes
        self._names = self.columns.keys() | self._rows

    def info(self) -> ManifestInfo:
        """Return the facts about the checkpoint."""
        facts = _object(self.blob.header.metadata, "info")
        for name, kind in _FACTS.items():
            if type(facts.get(name)) is not kind:
                raise TypeError(f"the manifest's {name} is {facts.get(name)!r}")
        rank, user = facts.get("rank"), facts.get("user")
        if not (rank is None or type(rank) is int):
            raise TypeError(f"the manifest's rank is {rank!r}")
        if not (isinstance(user, list) and all(map(_is_pair, user))):
            raise TypeError("the manifest's user metadata is not a list of pairs of strings")
        return ManifestInfo(**{name: facts[name] for name in _FACTS}, rank=rank, user=tuple(map(tuple, user)))

    def count(self, table: str) -> int:
        """Return the rows of a table, such as `chunk`."""
        count = self._rows.get(table, 0)
        if type(count) is not int or not 0 <= count <= self._limit:
            raise ValueError(f"a manifest of {self._limit} bytes cannot have {count!r} rows of {table}")
        return count

    def column(self, name: str, *, total: int | None = None, dim: int = 0) -> Any:
        """Return a column in the schema's dtype; a list for strings.

        `total` is the number of rows of a column that a sum counts.
        """
        column = COLUMNS[name]
        total = self.count(column.table) if total is None else total
        return (
            self._strings(name, total)
            if column.dtype is str
            else self._numbers(name.format(d=dim), column.dtype, total)
        )

    def _numbers(self, name: str, dtype: type[N], total: int) -> npt.NDArray[N]:
        column = self.columns.get(name)
        if total > self._limit * MAX_NUMBERS_PER_BYTE:
            raise ValueError(f"a manifest of {self._limit} bytes cannot have {total} numbers in {name}")
        values: npt.NDArray[Any]
        if name in self._rows:
            values = self._runs(name, total).numbers()
        elif column is None:
            raise ValueError(f"the column {name} is missing")
        elif column.count == 1 and total > 1:
            values = np.repeat(self.blob.read(name), total)
        elif column.count != total:
            raise ValueError(f"the column {name} has {column.count} rows, not {total}")
        else:
            values = self.blob.read(name)
        top = int(values.max()) if len(values) else 0
        if top > np.iinfo(dtype).max:
            raise ValueError(f"the column {name} contains {top}, which is out of range")
        return values.astype(dtype)

    def _runs(self, name: str, total: int) -> ColumnRuns:
        count = self.count(name)
        runs = ColumnRuns(*[self._numbers(f"{name}.{part}", np.uint64, count) for part in ColumnRuns.names])
        runs.check(total)
        return runs

    def _strings(self, name: str, total: int) -> list[str]:
        column = self.columns.get(f"{name}.text")
        if column is None or column.dtype != "<u1":
            raise ValueError(f"the column {name}.text is missing")
        lengths = self._numbers(f"{name}.bytes", np.int64, total)
        try:
            return unpack_strings(self.blob.read(f"{name}.text").astype(np.uint8), lengths)
        except ValueError as error:
            raise ValueError(f"the table {name} is damaged: {error}") from error

    def _ragged(self, name: str, counts: str | None = None) -> Any:
        """Return a column whose length is its own, or the sum of the column `counts`."""
        column = self.columns.get(name)
        if column is None or not (counts is None or add_up(self.column(counts), column.count)):
            raise ValueError(f"the column {name} does not have the rows that the tables ask for")
        return self.column(name, total=column.count)

    def _fields(self, columns: Iterable[Column]) -> dict[str, Any]:
        counted = [column for column in columns if column.field and not column.table.startswith("Σ")]
        return {column.field: self.column(column.name) for column in counted}

    def whole(self) -> CheckpointIndex:
        """Return the index."""
        links, counts = self.column("link"), self.column("chain.links")
        if not add_up(counts, len(links)):
            raise ValueError("the table of transforms does not match the chains")
        chains = tuple([tuple(links[start:end]) for start, end in pairwise(starts(counts).tolist())])
        index = CheckpointIndex(chains=chains, info=self.info(), **self._fields((*TENSORS, *OBJECTS, *ALIASES)))
        index.dtypes, index.files = map(tuple, self._fields(TABLES).values())
        check_column(COLUMNS["tensor.ndim"], index.tensor_ndim, {})
        total = self.count("chunk")
        if not add_up(index.tensor_chunks, total):
            raise ValueError(f"the tensors do not have {total} chunks")
        index.tensor_shape = self.column("tensor.shape", total=int(index.tensor_ndim.sum(dtype=np.int64)))
        self._put_boxes(index)
        if "chunk" in self._stored:
            self._put_chunk_items(index)
        if "object" in self._stored:
            index.object_items = self._items("object", self._ragged("object.running"))
        index.paths = self.paths(index.names())
        return index

    def _put_boxes(self, index: CheckpointIndex) -> None:
        layout = BoxLayout(np.repeat(index.tensor_ndim, index.tensor_chunks))
        if layout.numbers > self._limit * MAX_NUMBERS_PER_BYTE:
            raise ValueError(f"a manifest of {self._limit} bytes cannot have {layout.numbers} offsets")
        index.chunk_offsets = np.empty(layout.numbers, np.int64)
        index.chunk_sizes = np.empty(layout.numbers, np.int64)
        for dim in range(layout.dims):
            total = int(index.tensor_chunks[index.tensor_ndim > dim].sum())
            for name, boxes in (("chunk.offset.{d}", index.chunk_offsets), ("chunk.size.{d}", index.chunk_sizes)):
                boxes[layout.places(dim)] = self.column(name, total=total, dim=dim)

    def _put_chunk_items(self, index: CheckpointIndex) -> None:
        stored = None
        if "chunk.stored_bytes" not in self._names:
            item_bytes = self.column("dtype.item_bytes")
            check_column(COLUMNS["dtype.item_bytes"], item_bytes, {})
            check_column(COLUMNS["tensor.dtype"], index.tensor_dtype, {"dtype": len(item_bytes)})
            stored = np.maximum(derived_bytes(index, item_bytes), 0).astype(np.uint64)
        index.chunk_items = items = self._items("chunk", self._ragged("chunk.running", "tensor.running"), stored)
        blocks = self._fields(BLOCKS) if "chunk.blocks" in self._names else {}
        if blocks and blocks["counts"].any():
            lengths, crcs = (self._ragged(name, "tensor.blocks") for name in ("block.bytes", "block.crc32"))
            items.blocks = BlockColumns(**blocks, lengths=lengths, crcs=crcs)
        if "level" in self._rows and not index.is_part:
            chunks, stored = index.tensor_chunks, items.stored_bytes
            borders = level_borders(chunks, stored)
            if not add_up(borders, len(items.running_crcs)) or not np.array_equal(
                self.column("level.running"), borders
            ):
                raise ValueError("the levels do not have the running CRCs of their chunks")
            items.crc32 = by_tensor(items.crc32, chunks)
            items.running_crcs = by_tensor(items.running_crcs, chunks, stored)

    def _items(self, table: str, running: U32, stored: npt.NDArray[np.uint64] | None = None) -> ItemColumns:
        present = [column for column in ITEMS_OF[table] if column.field != "stored_bytes" or stored is None]
        fields: dict[str, Any] = {"stored_bytes": stored, **self._fields(present)}
        check_column(COLUMNS[f"{table}.stored_bytes"], fields["stored_bytes"], {})
        frame, leads, trails = (self.column(name) for name in (f"{table}.frame", "frame.lead", "frame.trail"))
        check_column(COLUMNS[f"{table}.frame"], frame, {"frame": len(leads)})
        length = leads[frame] + fields["stored_bytes"] + trails[frame]
        return ItemColumns(**fields, lead=leads[frame], length=length, running_crcs=running)

    def paths(self, names: list[str]) -> dict[str, tuple[PathElement, ...]] | None:
        """Return name → path in the nested state dict; None without paths."""
        if "path" not in self._rows:
            return None
        own_names = "path.name.bytes" in self.columns
        if own_names:
            names = self.column("path.name")
        elements, kinds = self.column("path.elements"), self.column("path.kind")
        if len(names) != len(elements):
            raise ValueError(f"there are {len(elements)} paths for {len(names)} names")
        separators = self.column("path.element_bytes")
        if not add_up(elements, len(kinds)) or not add_up(np.maximum(elements - 1, 0), len(separators)):
            raise ValueError("the lengths of the paths do not match their elements")
        texts = self.column("path.text") if "path.text.bytes" in self.columns else names
        paths: dict[str, tuple[PathElement, ...]] = dict.fromkeys(names, ()) if own_names else {}
        if not len(separators) and not kinds.any() and (elements == 1).all():
            return paths | {name: (text,) for name, text in zip(names, texts, strict=True)}
        lengths, kinds = separators.tolist(), kinds.tolist()
        at_length = at_kind = 0
        for name, text, count in zip(names, texts, elements.tolist(), strict=True):
            if count:
                parts = _split(text, lengths[at_length : at_length + count - 1])
                paths[name] = tuple(map(_path_element, parts, kinds[at_kind : at_kind + count]))
                at_length += count - 1
                at_kind += count
        return paths


def add_up(counts: I64, total: int) -> bool:
    """Sums must not overflow 64 bits."""
    return int(counts.max(initial=0)) <= total == int(counts.sum())


def _object(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = facts.get(name)
    if not isinstance(value, dict):
        raise TypeError(f"the manifest's metadata has no {name}")
    return value


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)


def _split(text: str, lengths: list[int]) -> list[str]:
    if text.isascii():
        return _cut(text, lengths, ".")
    cut = _cut(text.encode(*UTF8), lengths, b".")
    return [part.decode(*UTF8) for part in cut]


def _cut(text: AnyStr, lengths: list[int], dot: AnyStr) -> list[AnyStr]:
    parts: list[AnyStr] = []
    start = 0
    for length in lengths:
        end = start + length
        if text[end : end + 1] != dot:
            raise ValueError(f"the path of {text!r} does not fit its text")
        parts.append(text[start:end])
        start = end + 1
    parts.append(text[start:])
    return parts


def _path_element(part: str, kind: int) -> PathElement:
    if kind == PATH_KEY:
        return part
    if kind == PATH_LIST_INDEX and _PATH_INDEX.fullmatch(part):
        return int(part)
    if kind in (PATH_INT_KEY, PATH_LITERAL_KEY):
        return LiteralKey(part)
    raise ValueError(f"the path element {part!r} is not of kind {kind}")

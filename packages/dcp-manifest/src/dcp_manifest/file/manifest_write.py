"""Writer of `.metadata`: `[head][manifest][footer]`, see `docs/format.md`. Only stock reads the head."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dcp_manifest.errors import UnsupportedFormatError
from dcp_manifest.file.blob import (
    FLAG_STUB_HEAD,
    FOOTER_BYTES,
    MAJOR,
    MAJOR_WITH_RUNS,
    MAJOR_WITHOUT_RUNS,
    UTF8,
    Footer,
    LateColumn,
    pack,
    pack_strings,
)
from dcp_manifest.index.column_runs import ColumnRuns
from dcp_manifest.index.columns import (
    CHUNKS_AT_ONCE,
    RAW,
    BoxLayout,
    CheckpointIndex,
    ItemColumns,
    ManifestInfo,
    PathElement,
    distinct,
    starts,
)
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.levels import FEW_CHUNKS, level_borders, order_by_level
from dcp_manifest.index.literal_keys import LiteralKey
from dcp_manifest.index.schema import (
    ALIASES,
    BLOCKS,
    COLUMNS,
    FEW_ROWS,
    ITEMS_OF,
    MAX_NUMBERS_PER_BYTE,
    OBJECTS,
    PATH_INDEX_LIMIT,
    PATH_INT_KEY,
    PATH_KEY,
    PATH_LIST_INDEX,
    PATH_LITERAL_KEY,
    RUNS_ABOVE_CHUNKS,
    TABLES,
    TENSORS,
    Column,
    check_index,
    check_relative_path,
)
from dcp_manifest.stock.stock_write import stock_head, stub_head, unreadable_reason

Numbers = npt.NDArray[Any]
_ALIGNMENT = 8


def encode(
    index: CheckpointIndex, *, interop: bool | None = None, head: bytes | None = None, finds_runs: bool = True
) -> bytearray:
    """Encode an index with `info` as the bytes of `.metadata`; `read_index` returns an equal index.

    Args:
        index: Its item columns are None if no data is stored yet.
        interop: Whether the head is an index that stock can load, if stock can read the data files. None: unless the
            index has more than `RUNS_ABOVE_CHUNKS` chunks; stock takes minutes to read so many.
        head: Bytes to use as the head instead.
        finds_runs: Whether an index of so many chunks stores even columns as runs.

    Raises:
        UnsupportedFormatError: The index is inconsistent.
        UnsafeCheckpointError: A data file's name leads out of the checkpoint's folder.
    """
    chunks = int(index.tensor_chunks.sum())
    if chunks > CHUNKS_AT_ONCE:
        with suppress(AttributeError, TypeError):  # not in every C library
            # The ranks' results were freed in small pieces: columns do not fit into their gaps.
            ctypes.CDLL(None).malloc_trim(0)
    columns = _columns_of(index, finds_runs=finds_runs and chunks > RUNS_ABOVE_CHUNKS)
    flags = 0
    if head is None:
        reason = unreadable_reason(index) if interop in (None, True) else "it was saved with interop=False"
        if interop is None and chunks > RUNS_ABOVE_CHUNKS:
            reason = f"it has more than {RUNS_ABOVE_CHUNKS:,} chunks and was not saved with interop=True"
        head = stock_head(index) if reason is None else stub_head(reason)
        flags = 0 if reason is None else FLAG_STUB_HEAD
    # Aligned, so that readers can map the numbers in place. A pickle marks its own end, so padding may follow it.
    head += bytes(-len(head) % _ALIGNMENT)
    stored = [
        name for name, items in (("chunk", index.chunk_items), ("object", index.object_items)) if items is not None
    ]
    metadata = {"info": asdict(cast("ManifestInfo", index.info)), "rows": columns.rows, "stored": stored}
    data, index_crc32 = pack(columns.stored, metadata, before=len(head), after=FOOTER_BYTES)
    manifest = memoryview(data)[len(head) : -FOOTER_BYTES]
    numbers = max(len(index.chunk_offsets), len(index.tensor_shape))
    if max(columns.rows.values()) > len(manifest) or numbers > len(manifest) * MAX_NUMBERS_PER_BYTE:
        if columns.finds_runs:
            return encode(index, interop=interop, head=head, finds_runs=False)
        raise UnsupportedFormatError("the index cannot be written: it has more equal rows than readers accept")
    footer = Footer(
        manifest_offset=len(head),
        manifest_bytes=len(manifest),
        head_crc32=zlib.crc32(head),
        manifest_crc32=zlib.crc32(manifest),
        index_crc32=index_crc32,
        flags=flags,
        major=columns.major,
    )
    data[: len(head)], data[-FOOTER_BYTES:] = head, footer.to_bytes()
    return data


def _columns_of(index: CheckpointIndex, *, finds_runs: bool) -> _Columns:
    if index.info is None:
        raise UnsupportedFormatError(
            "an index without info cannot be written: set CheckpointIndex.info to a ManifestInfo"
        )
    for path in index.files:
        check_relative_path(path, file="the index to be written")
    try:
        check_index(index)
        columns = _Columns(finds_runs)
        parts = index.parts() if int(index.tensor_chunks.sum()) > CHUNKS_AT_ONCE else [index]
        _add_tables(columns, index, parts)
        _add_items(columns, index, parts)
        _add_paths(columns, index)
    except (ValueError, IndexError) as error:
        raise UnsupportedFormatError(f"the index cannot be written: {error}") from error
    return columns


@dataclass(slots=True)
class _Columns:
    finds_runs: bool
    major: int = MAJOR_WITHOUT_RUNS
    stored: dict[str, Numbers | LateColumn] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def add(self, column: Column, values: Any, *, dim: int = 0) -> None:
        name = column.name.format(d=dim)
        if not column.table.startswith("Σ"):
            self.rows[column.table] = len(values)
        if column.dtype is str:
            self.stored[f"{name}.text"], lengths = pack_strings(values)
            self.stored[f"{name}.bytes"] = narrow(lengths)
        elif column.is_narrowed:
            if not (self.finds_runs and column.may_be_runs and self._add_runs(name, values)):
                self.stored[name] = narrow(values, collapse=column.is_collapsed)
        else:
            self.stored[name] = values.astype(column.dtype, copy=False)

    def _add_runs(self, name: str, values: Numbers) -> bool:
        top = int(values.max()) if len(values) > 1 else 0
        runs = None if len(values) < 2 or top == int(values.min()) else ColumnRuns.of(values)
        if runs is None:
            return False
        parts = {f"{name}.{part}": narrow(getattr(runs, part)) for part in runs.names}
        if sum(part.nbytes for part in parts.values()) * 2 > len(values) * np.min_scalar_type(top).itemsize:
            return False
        self.stored.update(parts)
        self.rows[name] = len(runs.first)
        self.major = MAJOR_WITH_RUNS
        return True

    def add_fields(self, columns: Iterable[Column], source: object) -> None:
        for column in columns:
            if column.field:
                self.add(column, getattr(source, column.field))


def narrow(values: npt.NDArray[Any], *, collapse: bool = True) -> Numbers:
    """Convert numbers to the narrowest unsigned dtype; `collapse` makes equal numbers one."""
    if len(values) == 0:
        return np.zeros(0, np.uint8)
    few = values.tolist() if len(values) <= FEW_ROWS else (int(values.min()), int(values.max()))
    top = max(few)
    if collapse and top == min(few):
        values = values[:1]
    return values.astype(np.min_scalar_type(top), copy=False)


def _add_tables(columns: _Columns, index: CheckpointIndex, parts: Sequence[CheckpointIndex]) -> None:
    columns.add_fields(TABLES, index)
    item_bytes = np.array([ITEM_BYTES.get(dtype, 0) for dtype in index.dtypes], np.int64)
    columns.add(COLUMNS["dtype.item_bytes"], item_bytes)
    columns.add(COLUMNS["chain.links"], np.array([len(chain) for chain in index.chains], np.int64))
    columns.add(COLUMNS["link"], [link for chain in index.chains for link in chain])

    columns.add_fields((*TENSORS, *ALIASES, *OBJECTS), index)
    columns.rows["chunk"] = int(index.tensor_chunks.sum())
    for dim in range(int(index.tensor_ndim[index.tensor_chunks > 0].max(initial=0))):
        offsets, sizes = [], []
        for part in parts:
            layout = BoxLayout(part.tensor_ndim.repeat(part.tensor_chunks))
            if dim < layout.dims:
                places = layout.places(dim)
                offsets.append(narrow(part.chunk_offsets[places], collapse=False))
                sizes.append(narrow(part.chunk_sizes[places], collapse=False))
        columns.add(COLUMNS["chunk.offset.{d}"], np.concatenate(offsets), dim=dim)
        columns.add(COLUMNS["chunk.size.{d}"], np.concatenate(sizes), dim=dim)


def _add_items(columns: _Columns, index: CheckpointIndex, parts: Sequence[CheckpointIndex]) -> None:
    chunks, objects = index.chunk_items, index.object_items
    own = [part.chunk_items for part in parts if part.chunk_items is not None]
    tables = [distinct(_frames(items)) for items in (*own, objects) if items is not None]
    frames = distinct(np.concatenate([np.zeros(0, np.uint64), *tables]))
    columns.add(COLUMNS["frame.lead"], frames >> np.uint64(32))
    columns.add(COLUMNS["frame.trail"], frames & np.uint64(0xFFFFFFFF))
    if chunks is not None:
        sized = np.array([dtype in ITEM_BYTES for dtype in index.dtypes], np.bool_)
        plain = (chunks.framing == RAW) & (chunks.chain == 0) & sized[index.tensor_dtype].repeat(index.tensor_chunks)
        stored = [column for column in ITEMS_OF["chunk"] if column.field != "stored_bytes" or not plain.all()]
        columns.add_fields(stored, chunks)
        rows = [narrow(np.searchsorted(frames, _frames(items)), collapse=False) for items in own]
        columns.add(COLUMNS["chunk.frame"], np.concatenate(rows))
        counts = [_per_tensor(part, items.running_counts()) for part, items in zip(parts, own, strict=True)]
        columns.add(COLUMNS["tensor.running"], np.concatenate(counts))
        is_even = columns.major == MAJOR_WITH_RUNS and len(chunks) >= FEW_CHUNKS * len(index.tensor_names)
        if is_even and plain.all() and chunks.checked.all():
            _add_levels(columns, index, chunks)
        if chunks.blocks is not None:
            columns.add_fields(BLOCKS, chunks.blocks)
            columns.add(COLUMNS["tensor.blocks"], _per_tensor(index, chunks.blocks.counts))
    if objects is not None:
        columns.add_fields(ITEMS_OF["object"], objects)
        columns.add(COLUMNS["object.frame"], np.searchsorted(frames, _frames(objects)))


def _add_levels(columns: _Columns, index: CheckpointIndex, items: ItemColumns) -> None:
    """A rank that loads a few chunks per tensor then finds their CRCs in a few places."""
    chunks = index.tensor_chunks
    columns.major = MAJOR
    columns.add(COLUMNS["level.running"], level_borders(chunks, items.stored_bytes))
    for name, numbers, stored in (
        ("crc32", items.crc32, None),
        ("running", items.running_crcs, items.stored_bytes),
    ):
        write = partial(order_by_level, numbers, chunks, stored)
        columns.stored[f"chunk.{name}"] = LateColumn(len(numbers), write)


def _frames(items: ItemColumns) -> npt.NDArray[np.uint64]:
    trail = items.length - items.lead - items.stored_bytes
    if len(trail) and int(trail.max()) >= 1 << 32:
        raise ValueError("an item has 4 GiB or more after its stored range")
    frames: npt.NDArray[np.uint64] = items.lead.astype(np.uint64) << np.uint64(32) | trail
    return frames


def _per_tensor(index: CheckpointIndex, counts: Numbers) -> Numbers:
    """Sums let a reader find a single tensor's rows."""
    return np.diff(starts(counts)[starts(index.tensor_chunks)])


def _add_paths(columns: _Columns, index: CheckpointIndex) -> None:
    """Add the paths of values in the nested state dict.

    If each path's joined elements are the value's name, only the bytes of the elements (except the last) and their
    kinds are stored.
    """
    paths = index.paths
    if paths is None:
        return
    names: Sequence[str] = index.names()
    if not set(names).issuperset(paths) or not all(paths.values()):
        names = list(paths)
        columns.add(COLUMNS["path.name"], names)
    own = [paths.get(name, ()) for name in names]
    flat = list(chain.from_iterable(own))
    elements = np.fromiter(map(len, own), np.int64, len(own))
    types = set(map(type, flat))
    kinds = np.zeros(len(flat), np.int64) if types <= {str} else _kinds(flat, types)
    parts = [str(part) for part in flat] if kinds.any() else cast(list[str], flat)
    is_ascii = "".join(parts).isascii()
    encoded = parts if is_ascii else [part.encode(*UTF8) for part in parts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(parts))
    columns.add(COLUMNS["path.elements"], elements)
    columns.add(COLUMNS["path.element_bytes"], np.delete(lengths, np.cumsum(elements[elements > 0]) - 1))
    columns.add(COLUMNS["path.kind"], kinds)
    parts_of = cast(list[tuple[str, ...]], own) if types <= {str} else [tuple(map(str, path)) for path in own]
    texts = [".".join(path) if path else name for name, path in zip(names, parts_of, strict=True)]
    if texts != names:
        columns.add(COLUMNS["path.text"], texts)


def _kinds(flat: Sequence[PathElement], types: set[type]) -> Numbers:
    if not types <= {str, int, LiteralKey}:
        raise ValueError(f"a path may hold str and int, not {sorted(kind.__qualname__ for kind in types)}")
    return np.fromiter(map(_kind, flat), np.int64, len(flat))


def _kind(part: PathElement) -> int:
    if isinstance(part, LiteralKey):
        return PATH_INT_KEY if part.removeprefix("-").isdecimal() else PATH_LITERAL_KEY
    if isinstance(part, str):
        return PATH_KEY
    if abs(part) >= PATH_INDEX_LIMIT:
        raise ValueError(f"a list index in a path is not below {PATH_INDEX_LIMIT}")
    return PATH_LIST_INDEX

"""Schema of an index: all columns of a manifest, their limits and their meaning; `docs/format.md` repeats them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp_manifest.errors import UnsafeCheckpointError
from dcp_manifest.index.columns import (
    CHUNKS_AT_ONCE,
    ENCODED_BLOCK_MAX_BYTES,
    OBJECT,
    RAW,
    BlockColumns,
    BoxLayout,
    CheckpointIndex,
    Framing,
    ItemColumns,
    ItemKind,
    TensorFlags,
    distinct,
    starts,
)
from dcp_manifest.index.dtypes import ITEM_BYTES

MAX_NDIM: Final = 64
MAX_POSITION: Final = (1 << 62) - 1
MAX_NUMBERS_PER_BYTE: Final = 16
"""Numbers in a column per byte of the manifest, which bounds the memory for a hostile one."""
_MAX_ITEM_BYTES = 1024
_RAW_KIND = int(ItemKind.RAW)
RUNS_ABOVE_CHUNKS: Final = 1_000_000
"""Chunks above which even columns are stored as runs, in format 2.0. Indexes of fewer chunks stay in format 1.0."""
PATH_INDEX_LIMIT: Final = 10**18
FEW_ROWS: Final = 64  # up to so many numbers, a reduction by numpy costs more than `tolist` and one by Python

# Kinds of elements of a path, in the column `path.kind`: numbers, since members of an enumeration are slow to look up.
PATH_KEY, PATH_LIST_INDEX, PATH_INT_KEY, PATH_LITERAL_KEY = range(4)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a manifest, or two for a table of strings."""

    name: str
    """`x` stands for `chunk` or `object`, `{d}` for a dimension."""
    table: str
    """Table with one row per number, or the sum that counts them, in words."""
    meaning: str
    field: str = ""
    """Attribute of the index, its items or their blocks; empty if computed."""
    dtype: Any = np.uint32
    """In memory; `str` for a table of strings."""
    row_of: str = ""
    numbered_from: int = 0
    """Number of that table's first row; smaller numbers mean none."""
    most: int | None = None
    is_narrowed: bool = True
    is_collapsed: bool = True
    """Whether equal numbers are stored as one."""

    @property
    def may_be_runs(self) -> bool:
        """Whether an index of more than `RUNS_ABOVE_CHUNKS` chunks may store the column as runs."""
        return self.name.startswith("chunk.") and self.is_narrowed and self.field != "crc32"


TABLES = (
    Column("dtype", "dtype", "names of torch's dtypes without `torch.`", "dtypes", str),
    Column("file", "file", "relative paths of data files, `/` between parts", "files", str),
)
TENSORS = (
    Column("tensor.name", "tensor", "FQN", "tensor_names", str),
    Column("tensor.dtype", "tensor", "row of `dtype`", "tensor_dtype", np.uint8, row_of="dtype"),
    Column("tensor.flags", "tensor", "see below", "tensor_flags", np.uint8),
    Column("tensor.ndim", "tensor", "number of dimensions, at most 64", "tensor_ndim", np.uint8, most=MAX_NDIM),
    Column(
        "tensor.owner",
        "tensor",
        "0: a value of the whole job; r + 1: of rank r alone. (name, owner) is unique over tensors and objects",
        "tensor_owner",
    ),
    Column("tensor.shape", "Σ ndim", "global sizes, tensor after tensor", "tensor_shape", np.int64),
    Column(
        "tensor.chunks",
        "tensor",
        "number of chunks. Chunks are ordered by tensor: no column says which tensor a chunk belongs to",
        "tensor_chunks",
        np.int64,
    ),
)
OBJECTS = (
    Column("object.name", "object", "FQN of a value that is not a tensor", "object_names", str),
    Column("object.owner", "object", "as `tensor.owner`", "object_owner"),
)
ALIASES = (
    Column(
        "alias.name",
        "alias",
        "FQN of a value that is the same tensor as another; unique, and no name of a tensor or object",
        "alias_names",
        str,
    ),
    Column("alias.target", "alias", "row of `tensor`", "alias_targets", row_of="tensor"),
)
ITEMS = (
    Column("x.file", "x", "row of `file`", "file", row_of="file"),
    Column("x.position", "x", "first byte of the item in its file", "offset", np.uint64, most=MAX_POSITION),
    Column("x.frame", "x", "row of `frame`", dtype=np.int64, row_of="frame"),
    Column(
        "x.framing",
        "x",
        "0: the stored range is the chunk's elements, row-major, little-endian. 1: it is a `torch.save` archive of a "
        "tensor with the chunk's sizes. 2: a `torch.save` archive of an object",
        "framing",
        np.uint8,
        most=max(Framing),
    ),
    Column(
        "x.chain",
        "x",
        "0: no transform; n: row n − 1 of `chain`. The stored range must be decoded by the links in their order "
        "before it is what `framing` says",
        "chain",
        np.uint8,
        row_of="chain",
        numbered_from=1,
    ),
    Column("x.checked", "x", "1 if the row has CRCs, 0 if not", "checked", np.uint8, most=1),
    Column("x.crc32", "x", "CRC of the stored range; 0 if unchecked", "crc32"),
    Column(
        "x.stored_bytes",
        "x",
        "length of the stored range. `chunk.stored_bytes` is missing if every chunk has framing 0, no chain and a "
        "known dtype: then it is the product of the sizes times `dtype.item_bytes`",
        "stored_bytes",
        np.uint64,
        most=MAX_POSITION,
    ),
    Column(
        "x.running",
        "Σ borders",
        "running CRCs of all checked rows that are not in encoded blocks, row after row",
        "running_crcs",
        is_narrowed=False,
    ),
)
BLOCKS = (
    Column("chunk.blocks", "chunk", "encoded blocks of each chunk; 0: it is not stored in encoded blocks", "counts"),
    Column(
        "chunk.block_bytes",
        "chunk",
        "bytes of each block before it was encoded, at most 64 MiB; the last one may be shorter. 0 if `chunk.blocks` "
        "is",
        "block_bytes",
    ),
    Column(
        "block.bytes",
        "Σ `chunk.blocks`",
        "bytes of each encoded block, chunk after chunk",
        "lengths",
        is_collapsed=False,
    ),
    Column("block.crc32", "Σ `chunk.blocks`", "CRC of each encoded block", "crcs", is_narrowed=False),
)
PATHS = (
    Column("path.elements", "path", "how many elements each path has", dtype=np.int64),
    Column(
        "path.element_bytes",
        "separator",
        "length in UTF-8 of each element *but the last* of each path",
        dtype=np.int64,
    ),
    Column(
        "path.kind",
        "element",
        "0 key of a dict; 1 index of a list, in decimal; 2 key of a dict that was an integer, in decimal; 3 key of a "
        "dict that was another literal of Python, as `repr` gives it: `None`, a bool, float, complex or bytes, or a "
        "tuple of literals. A text that is no such literal stands for itself",
        dtype=np.int64,
    ),
    Column(
        "path.name",
        "path",
        "the names that have paths. If missing: the names of tensors, objects and aliases, in this order, each once; "
        "names with 0 elements have no path then",
        dtype=str,
    ),
    Column(
        "path.text",
        "path",
        "the elements of each path joined with `.`. If missing: the names themselves",
        dtype=str,
    ),
)
COMPUTED = (
    Column(
        "dtype.item_bytes",
        "dtype",
        "bytes per element; 0 if the writer did not know the dtype",
        dtype=np.int64,
        most=_MAX_ITEM_BYTES,
    ),
    Column("link", "link", "descriptors of transforms", dtype=str),
    Column(
        "chain.links",
        "chain",
        "how many links each chain has; chains take the links one after another",
        dtype=np.int64,
    ),
    Column("frame.lead", "frame", "bytes of an item before its stored range"),
    Column("frame.trail", "frame", "bytes of an item behind its stored range", dtype=np.uint64),
    Column(
        "tensor.running",
        "tensor",
        "how many numbers of `chunk.running` belong to the tensor's chunks (only if chunks are stored)",
        dtype=np.int64,
    ),
    Column(
        "level.running",
        "level",
        "how many numbers of `chunk.running` belong to each level's chunks (only if CRCs are in the order of levels)",
        dtype=np.int64,
    ),
    Column(
        "tensor.blocks",
        "tensor",
        "how many rows of `block.*` belong to the tensor's chunks",
        dtype=np.int64,
    ),
    Column(
        "chunk.offset.{d}",
        "Σ chunks of tensors with ndim > d",
        "start of each chunk in dimension d, in elements; chunks of tensors with fewer dimensions are left out",
        dtype=np.int64,
    ),
    Column(
        "chunk.size.{d}",
        "Σ chunks of tensors with ndim > d",
        "size of each chunk in dimension d, in elements; chunks of tensors with fewer dimensions are left out",
        dtype=np.int64,
    ),
)


def _of(table: str) -> tuple[Column, ...]:
    return tuple(
        replace(column, name=f"{table}{column.name[1:]}", table=table if column.table == "x" else column.table)
        for column in ITEMS
    )


ITEMS_OF = {table: _of(table) for table in ("chunk", "object")}
COLUMNS = {
    column.name: column
    for columns in (TABLES, TENSORS, OBJECTS, ALIASES, *ITEMS_OF.values(), BLOCKS, PATHS, COMPUTED)
    for column in columns
}
"""By name; `{d}` stands for every dimension."""


def check_column(column: Column, values: Sequence[str] | npt.NDArray[Any], rows: Mapping[str, int]) -> None:
    """Check that a column has one valid value per row of its table. Raises ValueError."""
    wanted = rows.get(column.table, len(values))
    if len(values) != wanted:
        raise ValueError(f"the column {column.name} has {len(values)} rows, not {wanted}")
    if not isinstance(values, np.ndarray) or not len(values):
        return
    few = values.tolist() if len(values) <= FEW_ROWS else (int(values.min()), int(values.max()))
    least, top, most = min(few), max(few), column.most
    if column.row_of:
        most = rows[column.row_of] + column.numbered_from - 1
    if most is not None and top > most:
        raise ValueError(f"the column {column.name} contains {top}, and its largest valid number is {most}")
    if least < 0:
        raise ValueError(f"the column {column.name} contains the negative number {least}")


def check_index(index: CheckpointIndex) -> None:
    """Check that the columns of an index are consistent, and that every number in them is valid.

    Afterwards each non-empty chunk is inside its tensor, all references between tables are valid, names are unique,
    stored ranges are inside their items, and raw items have the size that follows from dtype and sizes. Not checked:
    whether the chunks cover their tensor, and whether files exist.

    Raises ValueError; the message is a sentence about the first problem.
    """
    info = index.info
    if info is not None:
        _require(info.world_size >= 1, f"a save by {info.world_size} ranks")
        _require(info.rank is None or 0 <= info.rank < info.world_size, f"rank {info.rank} of {info.world_size}")
        _require(info.generation >= 0, f"the generation {info.generation}")
    rows = {
        "dtype": len(index.dtypes),
        "file": len(index.files),
        "chain": len(index.chains),
        "tensor": len(index.tensor_names),
        "object": len(index.object_names),
        "alias": len(index.alias_names),
    }
    _check_fields((*TENSORS, *OBJECTS, *ALIASES), index, rows)
    _require(len(index.tensor_shape) == int(index.tensor_ndim.sum()), "shapes do not fit the tensors' dimensions")
    for bits in distinct(index.tensor_flags).tolist():
        TensorFlags.from_bits(bits)
    rows["chunk"] = int(index.tensor_chunks.sum())
    fits = len(index.chunk_offsets) == len(index.chunk_sizes) == int(index.tensor_chunks @ index.tensor_ndim)
    _require(fits, "the chunks' boxes do not fit the tensors' dimensions")
    parts = index.parts() if rows["chunk"] > CHUNKS_AT_ONCE else [index]
    for part in parts:
        _check_boxes(part)
    _check_names(index)
    if index.object_items is not None:
        _require(index.object_items.blocks is None, "an object is encoded in blocks")
        _check_items(index.object_items, "object", rows)
        _require(not (index.object_items.framing == RAW).any(), "an object is stored as raw elements")
    if index.chunk_items is not None:
        _check_items(index.chunk_items, "chunk", rows)
        _require(not (index.chunk_items.framing == OBJECT).any(), "a chunk of a tensor is stored as an object")
        for part in parts:
            wanted, items = derived_bytes(part), part.chunk_items
            if items is not None:
                _check_raw_bytes(part, items, wanted)
            if items is not None and items.blocks is not None:
                _check_blocks(items, items.blocks, wanted)


def derived_bytes(index: CheckpointIndex, item_bytes: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
    """Return the decoded bytes per chunk; -1 for an unknown dtype. Raises ValueError if a chunk exceeds any memory.

    `item_bytes` is the size of each dtype's elements, or 0.
    """
    if item_bytes is None:
        item_bytes = np.array([ITEM_BYTES.get(dtype, 0) for dtype in index.dtypes] or [0], np.int64)
    per_chunk = item_bytes[index.tensor_dtype].repeat(index.tensor_chunks)
    layout = BoxLayout(index.tensor_ndim.repeat(index.tensor_chunks))
    volumes = layout.volumes(index.chunk_sizes)
    if len(volumes) and int(volumes.max()) > MAX_POSITION // _MAX_ITEM_BYTES:
        raise ValueError("a chunk has more bytes than any memory")
    known: npt.NDArray[np.int64] = np.where(per_chunk > 0, volumes * per_chunk, -1)
    return known


def _require(fact: bool | np.bool_, sentence: str) -> None:
    if not fact:
        raise ValueError(sentence)


def _check_fields(columns: Iterable[Column], source: object, rows: Mapping[str, int]) -> None:
    for column in columns:
        if column.field:
            check_column(column, getattr(source, column.field), rows)


def _check_boxes(index: CheckpointIndex) -> None:
    layout = BoxLayout(index.tensor_ndim.repeat(index.tensor_chunks))
    offsets, sizes = index.chunk_offsets, index.chunk_sizes
    _require(not (offsets < 0).any() and not (sizes < 0).any(), "a chunk has a negative offset or size")
    outside = np.zeros(layout.boxes, np.bool_)
    empty = np.zeros(layout.boxes, np.bool_)
    shapes = starts(index.tensor_ndim)
    for dim in range(layout.dims):
        rows, places = layout.rows(dim), layout.places(dim)
        deep = index.tensor_ndim > dim
        limits = index.tensor_shape[shapes[:-1][deep] + dim].repeat(index.tensor_chunks[deep])
        # Subtraction cannot overflow, addition could.
        outside[rows] |= sizes[places] > limits - offsets[places]
        empty[rows] |= sizes[places] == 0
    # Empty shards are recorded at or beyond the end of the tensor, depending on the writer.
    bad = outside & ~empty
    if bad.any():
        tensor = int(np.searchsorted(starts(index.tensor_chunks), int(np.argmax(bad)), "right")) - 1
        raise ValueError(f"a chunk of {index.tensor_names[tensor]!r} reaches beyond the tensor")


def _check_names(index: CheckpointIndex) -> None:
    if not index.tensor_owner.any() and not index.object_owner.any():
        names: list[object] = [*index.tensor_names, *index.object_names]
    else:
        names = [
            *zip(index.tensor_names, index.tensor_owner.tolist(), strict=True),
            *zip(index.object_names, index.object_owner.tolist(), strict=True),
        ]
    _require(len(set(names)) == len(names), "two values have the same name")
    plain = {*index.tensor_names, *index.object_names} if index.alias_names else set()
    _require(len(set(index.alias_names)) == len(index.alias_names), "two aliases have the same name")
    _require(plain.isdisjoint(index.alias_names), "an alias has the name of a value")


def _check_items(items: ItemColumns, table: str, rows: Mapping[str, int]) -> None:
    _check_fields(ITEMS_OF[table], items, rows)
    fits = len(items.lead) == len(items.length) == rows[table]
    _require(fits, f"a column of {table} items does not have {rows[table]} rows")
    too_long = len(items.length) and int(items.length.max()) > MAX_POSITION
    _require(not too_long, f"the length of a {table} is larger than any file")
    # Subtraction cannot overflow, addition could.
    fits = bool(((items.stored_bytes <= items.length) & (items.lead <= items.length - items.stored_bytes)).all())
    _require(fits, f"the stored range of a {table} reaches beyond its item")
    if items.blocks is not None:
        _check_fields(BLOCKS, items.blocks, rows)
    running = int(items.running_counts().sum())
    _require(
        len(items.running_crcs) == running, f"the {table}s have {len(items.running_crcs)} running CRCs, not {running}"
    )


def _check_blocks(items: ItemColumns, blocks: BlockColumns, decoded: npt.NDArray[np.int64]) -> None:
    encoded = blocks.counts > 0
    total = int(blocks.counts.sum(dtype=np.int64))
    _require(len(blocks.lengths) == len(blocks.crcs) == total, f"the number of encoded blocks is not {total}")
    _require(bool(((blocks.block_bytes > 0) == encoded).all()), "a chunk without encoded blocks has a block size")
    plain = (items.framing != RAW) | (items.chain == 0) | (items.checked == 0)
    _require(not (encoded & plain).any(), "a chunk in encoded blocks has no transform, no CRC or a frame")
    sizes = blocks.block_bytes.astype(np.int64)
    _require(not len(sizes) or int(sizes.max()) <= ENCODED_BLOCK_MAX_BYTES, "a block is too long once decoded")
    known = encoded & (decoded >= 0)
    counts = -(-decoded[known] // sizes[known])
    _require(
        bool((counts == blocks.counts[known]).all()), "a chunk's encoded blocks do not add up to its dtype and sizes"
    )
    ends = starts(blocks.lengths)[blocks.starts()]
    fits = np.diff(ends)[encoded] == items.stored_bytes.astype(np.int64)[encoded]
    _require(bool(fits.all()), "a chunk's encoded blocks do not fill its stored range")


def _check_raw_bytes(index: CheckpointIndex, items: ItemColumns, wanted: npt.NDArray[np.int64]) -> None:
    bad = (items.kinds() == _RAW_KIND) & (wanted >= 0) & (items.stored_bytes.astype(np.int64) != wanted)
    if bad.any():
        row = int(np.argmax(bad))
        tensor = int(np.searchsorted(starts(index.tensor_chunks), row, "right")) - 1
        raise ValueError(
            f"a chunk of {index.tensor_names[tensor]!r} has {items.stored_bytes[row]} bytes; its dtype and sizes "
            f"need {wanted[row]}"
        )


def check_relative_path(path: str, *, file: str) -> None:
    r"""Check that a relative path stays inside the checkpoint's folder on any system; messages name `file`.

    Raises UnsafeCheckpointError for a part that is empty, `.` or `..`, or contains `\`, NUL or a drive's `:`.
    """
    parts = path.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\\" in path or "\0" in path or parts[0][1:2] == ":":
        raise UnsafeCheckpointError(
            f"{file} names the data file {path!r}, which is not a plain path inside the checkpoint's directory; "
            "nothing is read from it: restore the index from a copy you trust"
        )

"""Columns of an index in memory: the form of manifests, stock's pickle and planners' records.

Tables: tensors (T rows), chunks (C rows, grouped by tensor in table order), objects (O rows), aliases (A rows). Ragged
columns (shapes, offsets, sizes) are flat: one number per dimension of the row's tensor.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dcp_manifest.types import I64, U8, U32, Bool

PathElement = str | int
RaggedStarts = tuple[list[int], list[int]]

CRC_BLOCK_MIN_BYTES = 64 * 1024
CRC_BLOCK_MAX_BYTES = 1024 * 1024
_BLOCK_STEP_BYTES = 4096
_DROPPED = "dcp.dropped"
CHUNKS_AT_ONCE = 1 << 18
# Wide columns first: while a column is joined, it needs twice its memory.
OF_AN_ITEM = ("crc32", "stored_bytes", "length", "offset", "file", "lead", "framing", "chain", "checked")
_OF_A_TENSOR = ("tensor_names", "tensor_dtype", "tensor_ndim", "tensor_chunks")

ENCODED_BLOCK_MAX_BYTES = 64 * 1024 * 1024
"""Decoded size; it bounds the memory for a hostile index."""


class Framing(IntEnum):
    """Framing of an item."""

    RAW = 0
    """Elements of the chunk: little-endian, row-major."""
    TORCH_ZIP = 1
    """A `torch.save` archive of the tensor (from stock, or of a dtype that cannot be framed)."""
    OBJECT = 2
    """A `torch.save` archive of an object."""


# To compare with columns: numpy compares ten times slower with a member.
RAW, OBJECT = int(Framing.RAW), int(Framing.OBJECT)


@dataclass(frozen=True, slots=True)
class EncodedBlocks:
    """An item's blocks, which can be decoded separately."""

    block_bytes: int
    """Decoded bytes per block; the last may be shorter."""
    lengths: npt.NDArray[np.uint32]
    """Encoded bytes per block; together they fill the stored range."""
    crcs: npt.NDArray[np.uint32]


class ItemKind(IntEnum):
    """Kind of a stored item: `RAW` and `BLOCKS` can be read in parts, others only as a whole."""

    RAW = 0
    """Raw elements."""
    BLOCKS = 1
    """A sequence of `EncodedBlocks`."""
    ARCHIVE = 2
    """A `torch.save` archive."""
    STREAM = 3
    """Raw elements or an archive, encoded as a whole by a chain of transforms."""

    @classmethod
    def of(cls, framing: int, *, has_chain: bool, has_blocks: bool) -> ItemKind:
        """Return an item's kind."""
        if has_blocks:
            return cls.BLOCKS
        if has_chain:
            return cls.STREAM
        return cls.RAW if framing == Framing.RAW else cls.ARCHIVE


# Not frozen, although nothing changes it: loads create one per tensor, and a frozen one takes four times as long.
@dataclass(slots=True)
class StoredItem:
    """Location of one item, and the CRCs that verify its bytes.

    `offset` and `length` span the item; the stored range begins `lead` bytes into it and has `stored_bytes` bytes.
    `crc32` is the range's CRC32, or None. `running_crcs` are the CRC32s of its prefixes up to each interior border of
    blocks of `block_bytes(stored_bytes)` bytes: `border_count(stored_bytes)` uint32 numbers, or None. `chain` lists
    transform descriptors in decoding order. An item with block transforms has `blocks`, and no `running_crcs`.
    """

    file: str
    offset: int
    length: int
    lead: int
    stored_bytes: int
    framing: Framing
    crc32: int | None = None
    running_crcs: npt.NDArray[np.uint32] | None = None
    chain: tuple[str, ...] = ()
    blocks: EncodedBlocks | None = None

    @property
    def kind(self) -> ItemKind:
        """Kind, by which the item is read."""
        return ItemKind.of(self.framing, has_chain=bool(self.chain), has_blocks=self.blocks is not None)

    @property
    def has_one_crc(self) -> bool:
        """Whether one CRC covers many blocks, as in stock's files: such an item can only be checked whole."""
        has_parts = self.running_crcs is not None or self.blocks is not None
        return self.crc32 is not None and not has_parts and border_count(self.stored_bytes) > 0


def block_bytes(stored_bytes: int) -> int:
    """Return the size of an item's CRC blocks: 1/32 of the stored range, at least 64 KiB, at most 1 MiB."""
    step = -(-stored_bytes // (32 * _BLOCK_STEP_BYTES)) * _BLOCK_STEP_BYTES
    return min(max(step, CRC_BLOCK_MIN_BYTES), CRC_BLOCK_MAX_BYTES)


def border_count(stored_bytes: int) -> int:
    """Return the interior block borders of a stored range: its blocks minus one, at least 0."""
    return max(0, -(-stored_bytes // block_bytes(stored_bytes)) - 1)


def border_counts(stored_bytes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return `border_count` of many stored ranges; none may have 2⁶² bytes or more."""
    if not len(stored_bytes) or int(stored_bytes.max()) <= CRC_BLOCK_MIN_BYTES:
        return np.zeros(len(stored_bytes), np.int64)
    sizes = stored_bytes.astype(np.int64)
    steps = -(-sizes // (32 * _BLOCK_STEP_BYTES)) * _BLOCK_STEP_BYTES
    blocks = -(-sizes // np.clip(steps, CRC_BLOCK_MIN_BYTES, CRC_BLOCK_MAX_BYTES))
    counts: npt.NDArray[np.int64] = np.maximum(blocks - 1, 0)
    return counts


@dataclass(frozen=True, slots=True)
class TensorFlags:
    """Properties of a tensor."""

    requires_grad: bool = False
    pin_memory: bool = False
    memory_format: int = 0
    """0 contiguous, 1 channels_last, 2 preserve."""
    layout: str = "strided"

    # bit 0 requires_grad, bit 1 pin_memory, bits 2-3 memory format, bits 4-7 layout
    def to_bits(self) -> int:
        """Return one byte."""
        return self.requires_grad | self.pin_memory << 1 | self.memory_format << 2 | _LAYOUTS.index(self.layout) << 4

    @classmethod
    def from_bits(cls, bits: int) -> TensorFlags:
        """Parse `to_bits`. Raises ValueError for other numbers."""
        layout = bits >> 4
        memory_format = bits >> 2 & 3
        if not 0 <= bits < 256 or layout >= len(_LAYOUTS) or memory_format > 2:
            raise ValueError(f"tensor flags {bits:#x} are not valid")
        return cls(bool(bits & 1), bool(bits & 2), memory_format, _LAYOUTS[layout])


_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")


_KINDS = np.array(
    [
        [[ItemKind.of(framing, has_chain=any_chain, has_blocks=in_blocks) for in_blocks in (False, True)]
         for any_chain in (False, True)]
        for framing in Framing
    ],
    np.uint8,
)  # fmt: skip


@dataclass(slots=True)
class BlockColumns:
    """`EncodedBlocks` as columns: a row per item, and per block."""

    counts: U32
    block_bytes: U32
    """Decoded block size per item, or 0."""
    lengths: U32
    crcs: U32

    def starts(self) -> I64:
        """Return each item's first row of blocks, then the end: items + 1 numbers."""
        return starts(self.counts)


@dataclass(slots=True)
class ItemColumns:
    """`StoredItem`s as columns; `file` and `chain` refer to tables of the `CheckpointIndex`."""

    file: U32
    offset: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    lead: U32
    stored_bytes: npt.NDArray[np.uint64]
    framing: U8
    chain: U8
    """0 for no transforms, n for `chains[n - 1]`."""
    checked: U8
    """1 for an item with a CRC, else 0."""
    crc32: U32
    running_crcs: U32
    """All rows'; see `running_counts`."""
    blocks: BlockColumns | None = None

    def __len__(self) -> int:
        return len(self.file)

    def kinds(self) -> U8:
        """Return `ItemKind`s."""
        in_blocks = np.zeros(len(self.file), np.bool_) if self.blocks is None else self.blocks.counts > 0
        kinds: U8 = _KINDS[self.framing, (self.chain > 0).astype(np.uint8), in_blocks.astype(np.uint8)]
        return kinds

    def running_counts(self) -> U32:
        """Return the running CRCs per row: 0 without CRCs or in encoded blocks."""
        bordered = self.checked != 0
        if self.blocks is not None:
            bordered &= self.blocks.counts == 0
        counts = np.empty(len(bordered), np.uint32)
        for start in range(0, len(bordered), CHUNKS_AT_ONCE):
            part = slice(start, start + CHUNKS_AT_ONCE)
            counts[part] = border_counts(self.stored_bytes[part]) * bordered[part]
        return counts


@dataclass(frozen=True, slots=True)
class ManifestInfo:
    """Facts about the checkpoint as a whole."""

    save_id: str
    world_size: int
    writer: str
    """Program and version, e.g. `dcp-core/0.1.0`."""
    generation: int = 1
    """Grows by one with each save to the same checkpoint id: the higher is newer."""
    rank: int | None = None
    """Rank that wrote a rank-local index (`use_collectives=False`)."""
    created_ns: int = 0
    """Wall-clock time of the save's start, nanoseconds since the epoch; 0 if unknown.

    It orders checkpoints only if steps (or, within a folder, generations) do not decide.
    """
    user: tuple[tuple[str, str], ...] = ()
    """User metadata: pairs of key and value."""

    @property
    def origin(self) -> str:
        """Id of the save that wrote the values, if parts of the checkpoint were dropped since; else `save_id`."""
        return next((str(fact["of"]) for fact in self._drops()), self.save_id)

    @property
    def dropped(self) -> dict[str, str]:
        """Dropped part → by what and when, as text. A part is a name, or all names below it."""
        return {part: f"{fact['by']}, {fact['at']}" for fact in self._drops() for part in fact["parts"]}

    def why_missing(self, name: str) -> str | None:
        """Return by what and when a value was dropped; None if it was not."""
        return next((why for part, why in self.dropped.items() if f"{name}.".startswith(f"{part}.")), None)

    def without(self, parts: Sequence[str], by: str) -> ManifestInfo:
        """Return the facts of this checkpoint without some parts; `by` says why."""
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        fact = json.dumps({"parts": parts, "by": by, "at": at, "of": self.origin})
        return replace(self, user=(*self.user, (_DROPPED, fact)))

    def _drops(self) -> Iterator[dict[str, Any]]:
        for key, value in self.user:
            with contextlib.suppress(ValueError, RecursionError):
                fact = json.loads(value) if key == _DROPPED else None
                if isinstance(fact, dict) and isinstance(fact.get("parts"), list) and {"by", "at", "of"} <= fact.keys():
                    yield {**fact, "parts": [*map(str, fact["parts"])]}


@dataclass(slots=True)
class CheckpointIndex:
    """Index of a checkpoint, as columns.

    `chunk_items` and `object_items` are None before any data is stored. `info` is None for an index that stock wrote.
    `tensor_owner` and `object_owner` are 0 for a value of the whole job and r + 1 for a value that only rank r saved;
    (name, owner) is unique. `paths` maps a name to its path in the nested state dict; None if it was saved flat.
    """

    dtypes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """Relative paths, with `/`."""
    chains: tuple[tuple[str, ...], ...] = ()
    tensor_names: list[str] = field(default_factory=list)
    tensor_dtype: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    tensor_flags: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    tensor_ndim: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    tensor_owner: U32 = field(default_factory=lambda: np.zeros(0, np.uint32))
    tensor_shape: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    tensor_chunks: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    """Chunks per tensor."""
    chunk_offsets: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    chunk_sizes: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    chunk_items: ItemColumns | None = None
    object_names: list[str] = field(default_factory=list)
    object_owner: U32 = field(default_factory=lambda: np.zeros(0, np.uint32))
    object_items: ItemColumns | None = None
    alias_names: list[str] = field(default_factory=list)
    alias_targets: U32 = field(default_factory=lambda: np.zeros(0, np.uint32))
    """Rows of tensors."""
    paths: dict[str, tuple[PathElement, ...]] | None = None
    info: ManifestInfo | None = None
    is_part: bool = False
    """Whether chunks are left out, because the rank that read the index does not load them."""

    def names(self) -> list[str]:
        """Return the names of all tensors, objects and aliases, in this order, without duplicates."""
        return list(dict.fromkeys((*self.tensor_names, *self.object_names, *self.alias_names)))

    def stored_item(self, columns: ItemColumns, row: int, starts: RaggedStarts | None = None) -> StoredItem:
        """Return a row of this index's `columns`. `starts` caches `ragged_starts(columns)`."""
        chain = int(columns.chain[row])
        running_starts, block_starts = self.ragged_starts(columns) if starts is None else starts
        crc32: int | None = None
        running: npt.NDArray[np.uint32] | None = None
        blocks: EncodedBlocks | None = None
        if columns.blocks is not None and columns.blocks.counts[row]:
            part = slice(block_starts[row], block_starts[row + 1])
            table = columns.blocks
            blocks = EncodedBlocks(int(table.block_bytes[row]), table.lengths[part], table.crcs[part])
        if columns.checked[row]:
            crc32 = int(columns.crc32[row])
            if blocks is None:
                running = columns.running_crcs[running_starts[row] : running_starts[row + 1]]
        return StoredItem(
            file=self.files[columns.file[row]],
            offset=int(columns.offset[row]),
            length=int(columns.length[row]),
            lead=int(columns.lead[row]),
            stored_bytes=int(columns.stored_bytes[row]),
            framing=Framing(int(columns.framing[row])),
            crc32=crc32,
            running_crcs=running,
            chain=self.chains[chain - 1] if chain else (),
            blocks=blocks,
        )

    @staticmethod
    def ragged_starts(columns: ItemColumns) -> RaggedStarts:
        """Return each row's start in `running_crcs`, and in the blocks (empty without blocks), both with the end."""
        return starts(
            columns.running_counts()
        ).tolist(), [] if columns.blocks is None else columns.blocks.starts().tolist()

    def parts(self) -> list[CheckpointIndex]:
        """Return views of consecutive tensors, without running CRCs."""
        items = self.chunk_items
        if items is not None and items.blocks is not None:
            return [self]
        chunks, boxes, shapes = self.chunk_starts(), self.box_starts().tolist(), self.shape_starts().tolist()
        cuts = distinct(np.searchsorted(chunks, np.arange(0, chunks[-1], CHUNKS_AT_ONCE), "right") - 1).tolist()
        found = []
        for start, stop in pairwise([0, *cuts[1:], len(self.tensor_names)]):
            rows, own = slice(*chunks[[start, stop]].tolist()), slice(start, stop)
            part = replace(self, **{name: getattr(self, name)[own] for name in _OF_A_TENSOR})
            part.tensor_shape = self.tensor_shape[shapes[start] : shapes[stop]]
            part.chunk_offsets = self.chunk_offsets[boxes[start] : boxes[stop]]
            part.chunk_sizes = self.chunk_sizes[boxes[start] : boxes[stop]]
            if items is not None:
                own_items = {name: getattr(items, name)[rows] for name in OF_AN_ITEM}
                part.chunk_items = ItemColumns(**own_items, running_crcs=items.running_crcs[:0])
            found.append(part)
        return found

    def chunk_starts(self) -> I64:
        """Return each tensor's first row of chunks, then the end: T + 1 numbers."""
        return starts(self.tensor_chunks)

    def box_starts(self) -> I64:
        """As `chunk_starts`, for `chunk_offsets` and `chunk_sizes`."""
        return starts(self.tensor_chunks * self.tensor_ndim.astype(np.int64))

    def shape_starts(self) -> I64:
        """As `chunk_starts`, for `tensor_shape`."""
        return starts(self.tensor_ndim)


def needed_bytes(index: CheckpointIndex) -> dict[str, int]:
    """Return the minimum size per data file in bytes: the end of its last item."""
    ends = np.zeros(len(index.files), np.uint64)
    for items in (index.chunk_items, index.object_items):
        if items is not None:
            np.maximum.at(ends, items.file, items.offset.astype(np.uint64) + items.length)
    return dict(zip(index.files, ends.tolist(), strict=True))


Number = TypeVar("Number", bound=np.integer[Any])


def starts(counts: npt.NDArray[np.integer[Any]]) -> I64:
    """Return the starts of consecutive runs, and the end."""
    sums = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=sums[1:])
    return sums


def ranges(first: I64, last: I64) -> I64:
    """Return all integers in the ranges [`first[i]`, `last[i]`), concatenated."""
    lengths = last - first
    sums = starts(lengths)
    numbers: I64 = np.arange(int(sums[-1])) + (first - sums[:-1]).repeat(lengths)
    return numbers


def distinct(numbers: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Return distinct numbers, ascending."""
    # `np.unique` imports `numpy.ma`, which takes longer than reading a small index.
    ascending = np.sort(numbers)
    is_new = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_new[1:])
    return ascending[is_new]


class BoxLayout:
    """Positions of one dimension's numbers in a column of boxes."""

    def __init__(self, ndim: npt.NDArray[np.integer[Any]]) -> None:
        self.boxes = len(ndim)
        self.dims = int(ndim.max()) if len(ndim) else 0
        self.numbers = int(ndim.sum(dtype=np.int64))
        self._uniform = self.numbers == self.dims * self.boxes
        self._ndim = ndim
        self._starts = None if self._uniform else starts(ndim)

    def rows(self, dim: int) -> Bool | slice:
        """Return the boxes that have a dimension `dim`."""
        return slice(None) if self._uniform else self._ndim > dim

    def places(self, dim: int) -> I64 | slice:
        """Return the positions of numbers for dimension `dim`."""
        if self._starts is None:
            return slice(dim, None, self.dims)
        return self._starts[:-1][self._ndim > dim] + dim

    def volumes(self, sizes: I64) -> I64:
        """Return the elements per box; ValueError for 2⁶² or more."""
        products = np.ones(self.boxes, np.int64)
        estimates = np.ones(self.boxes)
        # An overflowing integer product is wrong, unless one of the sizes is 0.
        with np.errstate(over="ignore", invalid="ignore"):
            for dim in range(self.dims):
                rows, numbers = self.rows(dim), sizes[self.places(dim)]
                products[rows] *= numbers
                estimates[rows] *= numbers
            if (estimates >= 2.0**62).any():
                raise ValueError("a chunk has more elements than any memory")
        return products

    def __repr__(self) -> str:
        return f"BoxLayout({self.boxes} boxes, {self.numbers} numbers)"

"""Columns of a checkpoint's index in memory.

`CheckpointIndex` is the common form of all readers and writers of indexes: manifests, stock's pickle and the planners'
records are converted to it and from it. No bytes are read or written here, and torch is not needed.

Tables: tensors (T rows), chunks (C rows, grouped by tensor in table order), objects (O rows), aliases (A rows). Ragged
columns (shapes, offsets, sizes) are flat; a row has as many numbers as its tensor has dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dcp_manifest.index.box_columns import starts
from dcp_manifest.index.items import EncodedBlocks, Framing, ItemKind, StoredItem, border_counts

__all__ = [
    "BlockColumns",
    "CheckpointIndex",
    "ItemColumns",
    "ManifestInfo",
    "PathElement",
    "RaggedStarts",
    "TensorFlags",
]

PathElement = str | int
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]
RaggedStarts = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class TensorFlags:
    """Properties of a tensor other than its dtype, as stock records them."""

    requires_grad: bool = False
    pin_memory: bool = False
    memory_format: int = 0
    """Memory format: 0 contiguous, 1 channels_last, 2 preserve."""
    layout: str = "strided"

    # bit 0 requires_grad, bit 1 pin_memory, bits 2-3 memory format, bits 4-7 layout
    def to_bits(self) -> int:
        """Return the flags as one byte."""
        return self.requires_grad | self.pin_memory << 1 | self.memory_format << 2 | _LAYOUTS.index(self.layout) << 4

    @classmethod
    def from_bits(cls, bits: int) -> TensorFlags:
        """Parse the flags from a byte that `to_bits` returned. Raises ValueError for any other number."""
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
"""Kind of an item (`ItemKind`) by framing, whether it has a transform chain, and whether it has encoded blocks."""


@dataclass(slots=True)
class BlockColumns:
    """`EncodedBlocks` of many items as columns: one row per item, and one row per block, grouped by item."""

    counts: U32
    """Number of blocks of each item; 0 for items that are not encoded in blocks."""
    block_bytes: U32
    """Decoded block size of each item, bytes; 0 for items that are not encoded in blocks."""
    lengths: U32
    crcs: U32

    def starts(self) -> I64:
        """Return the row of each item's first block, followed by the total number of blocks: items + 1 numbers."""
        return starts(self.counts)


@dataclass(slots=True)
class ItemColumns:
    """`StoredItem`s as columns, one row per item; `file` and `chain` refer to the tables of the `CheckpointIndex`."""

    file: U32
    offset: npt.NDArray[np.uint64]
    """Start of each item in its file, bytes."""
    length: npt.NDArray[np.uint64]
    lead: U32
    stored_bytes: npt.NDArray[np.uint64]
    framing: U8
    chain: U8
    """Transform chain of each item: 0 for none, n for `chains[n - 1]`."""
    checked: U8
    """1 for an item with a CRC (and running CRCs), 0 for an item without."""
    crc32: U32
    running_crcs: U32
    """Running CRCs of all items that have them, concatenated; see `running_counts`."""
    blocks: BlockColumns | None = None
    """Encoded blocks of the items; None if no item is encoded in blocks."""

    def __len__(self) -> int:
        return len(self.file)

    def kinds(self) -> U8:
        """Return the `ItemKind` of each row."""
        in_blocks = np.zeros(len(self), np.bool_) if self.blocks is None else self.blocks.counts > 0
        kinds: U8 = _KINDS[self.framing, (self.chain > 0).astype(np.uint8), in_blocks.astype(np.uint8)]
        return kinds

    def running_counts(self) -> I64:
        """Return the number of running CRCs of each row: 0 for an item without CRCs or in encoded blocks."""
        bordered = self.checked != 0
        if self.blocks is not None:
            bordered &= self.blocks.counts == 0
        counts: I64 = border_counts(self.stored_bytes) * bordered
        return counts


@dataclass(frozen=True, slots=True)
class ManifestInfo:
    """Facts about the checkpoint as a whole, stored in its manifest."""

    save_id: str
    world_size: int
    writer: str
    """Program and version that wrote the checkpoint, e.g. `dcp-core/0.1.0`."""
    generation: int = 1
    """Number that grows by one with each save to the same checkpoint id; the index with the higher number is newer."""
    rank: int | None = None
    """The rank that wrote a rank-local index (`use_collectives=False`); None for a whole checkpoint."""
    created_ns: int = 0
    """Wall-clock time of the save's start, nanoseconds since the epoch; 0 if unknown. Used to order checkpoints only if
    steps (or, within a folder, generations) do not decide."""
    user: tuple[tuple[str, str], ...] = ()
    """User metadata of the save: pairs of key and value."""


@dataclass(slots=True)
class CheckpointIndex:
    """Index of a checkpoint, as columns.

    `chunk_items` and `object_items` are None before any data is stored. `info` is None for an index that stock wrote.
    `tensor_owner` and `object_owner` are 0 for a value of the whole job and r + 1 for a value that only rank r saved;
    (name, owner) is unique.
    `paths` maps a name to its path in the nested state dict; None if the state dict was saved flat.
    """

    dtypes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """Relative paths of the data files, with `/`."""
    chains: tuple[tuple[str, ...], ...] = ()
    tensor_names: list[str] = field(default_factory=list)
    tensor_dtype: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    tensor_flags: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    tensor_ndim: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    tensor_owner: U32 = field(default_factory=lambda: np.zeros(0, np.uint32))
    tensor_shape: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    tensor_chunks: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    """Number of chunks of each tensor."""
    chunk_offsets: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    chunk_sizes: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    chunk_items: ItemColumns | None = None
    object_names: list[str] = field(default_factory=list)
    object_owner: U32 = field(default_factory=lambda: np.zeros(0, np.uint32))
    object_items: ItemColumns | None = None
    alias_names: list[str] = field(default_factory=list)
    alias_targets: U32 = field(default_factory=lambda: np.zeros(0, np.uint32))
    """For each alias, the row of its tensor in the table of tensors."""
    paths: dict[str, tuple[PathElement, ...]] | None = None
    info: ManifestInfo | None = None

    def stored_item(self, columns: ItemColumns, row: int, starts: RaggedStarts | None = None) -> StoredItem:
        """Return a row of `columns` as a `StoredItem`.

        Args:
            columns: Items of this index.
            row: Number of the row.
            starts: Result of `ragged_starts(columns)`; None computes it.
        """
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
        """Return two lists: each row's start in `running_crcs`, and each row's first row in the columns of blocks.

        Both lists end with one more number, the end of the last row; the second is empty if no item has blocks.
        """
        return starts(
            columns.running_counts()
        ).tolist(), [] if columns.blocks is None else columns.blocks.starts().tolist()

    def chunk_starts(self) -> I64:
        """Return the row of each tensor's first chunk, followed by the number of chunks: T + 1 numbers."""
        return starts(self.tensor_chunks)

    def box_starts(self) -> I64:
        """Return each tensor's start in `chunk_offsets` and `chunk_sizes`, followed by the end: T + 1 numbers."""
        return starts(self.tensor_chunks * self.tensor_ndim.astype(np.int64))

    def shape_starts(self) -> I64:
        """Return each tensor's start in `tensor_shape`, followed by the end: T + 1 numbers."""
        return starts(self.tensor_ndim)

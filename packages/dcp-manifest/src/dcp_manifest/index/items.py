"""Records of stored items: the bytes in a file for one chunk of a tensor or one object.

The index, the byte engine and the planners share these records. Byte ranges are half-open. An *item* is one payload in
a file with its framing; the *stored range* is the bytes of the payload without the framing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

__all__ = [
    "CRC_BLOCK_MAX_BYTES",
    "CRC_BLOCK_MIN_BYTES",
    "ENCODED_BLOCK_MAX_BYTES",
    "EncodedBlocks",
    "Framing",
    "ItemKind",
    "StoredItem",
    "block_bytes",
    "border_count",
    "border_counts",
]

CRC_BLOCK_MIN_BYTES = 64 * 1024
CRC_BLOCK_MAX_BYTES = 1024 * 1024
_BLOCK_STEP_BYTES = 4096

ENCODED_BLOCK_MAX_BYTES = 64 * 1024 * 1024
"""Limit of the decoded size of one encoded block, bytes. It bounds the memory for a hostile index."""


class Framing(IntEnum):
    """Framing of an item: raw elements, or a `torch.save` archive."""

    RAW = 0
    """Only the elements of the chunk: little-endian, row-major."""
    TORCH_ZIP = 1
    """A whole `torch.save` archive that contains the tensor (written by stock, or of a dtype that cannot be framed)."""
    OBJECT = 2
    """A whole `torch.save` archive that contains an object."""


@dataclass(frozen=True, slots=True)
class EncodedBlocks:
    """The blocks of an item that was encoded by block transforms; each block can be decoded separately."""

    block_bytes: int
    """Decoded size of each block, bytes; the last block may be shorter."""
    lengths: npt.NDArray[np.uint32]
    """Encoded size of each block, bytes; together the blocks fill the stored range."""
    crcs: npt.NDArray[np.uint32]
    """CRC32 of each encoded block."""


class ItemKind(IntEnum):
    """Kind of a stored item: items of kind `RAW` and `BLOCKS` can be read in parts, other items only as a whole."""

    RAW = 0
    """The stored range is the raw elements."""
    BLOCKS = 1
    """The stored range is a sequence of encoded blocks; see `EncodedBlocks`."""
    ARCHIVE = 2
    """The stored range is a `torch.save` archive that contains the tensor or object."""
    STREAM = 3
    """The stored range was encoded as a whole by a chain of transforms; it decodes to raw elements or to an archive."""

    @classmethod
    def of(cls, framing: int, *, has_chain: bool, has_blocks: bool) -> ItemKind:
        """Return the kind of an item, from its framing and its transforms."""
        if has_blocks:
            return cls.BLOCKS
        if has_chain:
            return cls.STREAM
        return cls.RAW if framing == Framing.RAW else cls.ARCHIVE


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Location of one item, and the CRCs that verify its bytes.

    `offset` and `length` span the item; the stored range begins `lead` bytes into it and has `stored_bytes` bytes.
    `crc32` is the CRC32 of the stored range, or None if the writer stored no CRC. `running_crcs` are the CRC32s of the
    range's prefixes up to each interior border of blocks of `block_bytes(stored_bytes)` bytes:
    `border_count(stored_bytes)` uint32 numbers, or None. `chain` lists transform descriptors in decoding order. An item
    with block transforms has `blocks`, and no `running_crcs`.
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
        """Kind of the item, which determines how its data are read."""
        return ItemKind.of(self.framing, has_chain=bool(self.chain), has_blocks=self.blocks is not None)


def block_bytes(stored_bytes: int) -> int:
    """Return the size of an item's CRC blocks in bytes: 1/32 of the stored range, at least 64 KiB, at most 1 MiB."""
    step = -(-stored_bytes // (32 * _BLOCK_STEP_BYTES)) * _BLOCK_STEP_BYTES
    return min(max(step, CRC_BLOCK_MIN_BYTES), CRC_BLOCK_MAX_BYTES)


def border_count(stored_bytes: int) -> int:
    """Return the number of interior block borders of a stored range: its number of blocks minus one, at least 0."""
    return max(0, -(-stored_bytes // block_bytes(stored_bytes)) - 1)


def border_counts(stored_bytes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return `border_count` of many stored ranges at once; none may have 2⁶² bytes or more."""
    sizes = stored_bytes.astype(np.int64)
    steps = -(-sizes // (32 * _BLOCK_STEP_BYTES)) * _BLOCK_STEP_BYTES
    blocks = -(-sizes // np.clip(steps, CRC_BLOCK_MIN_BYTES, CRC_BLOCK_MAX_BYTES))
    counts: npt.NDArray[np.int64] = np.maximum(blocks - 1, 0)
    return counts

"""Transforms of blocks, so that a part of a stored tensor is read without decoding the rest: contract, and chains.

Which items go through them is decided in `compression`; cutting, storing and checking of blocks is the engine's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import cast

from dcp_core.encoding.transforms import Extension, ExtensionRegistry, transforms_of
from dcp_core.errors import UnsupportedFormatError
from dcp_manifest.index.items import StoredItem

__all__ = ["BlockChain", "BlockTransformExtension", "BlockUndo", "block_bytes", "block_undo"]

_MIN_BLOCK_BYTES = 256 << 10
_MAX_BLOCK_BYTES = 1 << 20
_BLOCKS_PER_ITEM = 128
# What a block becomes on the way through a chain may be longer than in the end, but not by much.
_MARGIN_BYTES = 64 << 10


class BlockTransformExtension(Extension):
    """A transform of blocks of a tensor's bytes, for size: what does not get smaller is stored as it is.

    (What must apply to all items, such as encryption, is a `StreamTransformExtension`.) One instance is used by several
    threads at once. Encoding and decoding should spend their time without the GIL.
    """

    def for_item(self, sample: memoryview, dtype: str) -> tuple[BlockTransformExtension, float]:
        """The transform for one tensor, and about what share of its bytes is left.

        Args:
            sample: Some of the tensor's elements.
            dtype: See `encode_block`.

        Returns:
            This transform, or one of the same descriptor with settings that suit the sample.
        """
        return self, len(self.encode_block(sample, dtype)) / len(sample)

    @abstractmethod
    def encode_block(self, block: memoryview, dtype: str) -> bytes | bytearray | memoryview:
        """The block, encoded; the memory may be used again for the next block of the same thread.

        Args:
            block: Whole elements; at most 1 MiB.
            dtype: Their torch dtype's name without `torch.`; of what another transform has encoded, `uint8`.
        """

    @abstractmethod
    def decoded_bytes(self, data: memoryview) -> int:
        """How many bytes an encoded block says that it becomes. Raises ValueError if it is none."""

    @abstractmethod
    def decode_block(self, data: memoryview, into: memoryview) -> None:
        """Fill `into`, which has `decoded_bytes(data)` bytes; takes no memory beyond a small multiple of both.

        Raises:
            Exception: The data are damaged. (They are as they were written: their CRC was checked before.)
        """


class BlockChain:
    """What the blocks of one tensor go through; satisfies `dcp_manifest.BlockEncoder`.

    Args:
        transforms: The first one writes what is stored, the last one takes the tensor's elements.
        dtype: Of the elements.
        block_bytes: Of each block before it is encoded.
    """

    __slots__ = ("_dtype", "_transforms", "block_bytes", "descriptors")

    def __init__(self, transforms: Sequence[BlockTransformExtension], dtype: str, block_bytes: int) -> None:
        self._transforms = tuple(transforms)
        self._dtype = dtype
        self.block_bytes = block_bytes
        self.descriptors = tuple(each.get_descriptor() for each in transforms)

    def encode(self, block: memoryview) -> bytes | bytearray | memoryview:
        """One block through all of them."""
        data: bytes | bytearray | memoryview = block
        dtype = self._dtype
        for transform in reversed(self._transforms):
            data = transform.encode_block(memoryview(data), dtype)
            dtype = "uint8"
        return data


class BlockUndo:
    """What undoes a chain; satisfies `dcp_manifest.BlockDecoder`. Nothing is allocated before its size is checked.

    Args:
        transforms: In the order in which they are undone.
    """

    __slots__ = ("_transforms",)

    def __init__(self, transforms: Sequence[BlockTransformExtension]) -> None:
        self._transforms = tuple(transforms)

    def decode(self, data: memoryview, into: memoryview) -> None:
        """Fill `into` with what the block becomes. Raises ValueError if that has another length."""
        *outer, inner = self._transforms
        for transform in outer:
            size = transform.decoded_bytes(data)
            if not 0 <= size <= 2 * len(into) + _MARGIN_BYTES:
                raise ValueError(f"it says that it becomes {size:,} bytes on the way to {len(into):,}")
            between = memoryview(bytearray(size))
            transform.decode_block(data, between)
            data = between
        size = inner.decoded_bytes(data)
        if size != len(into):
            raise ValueError(f"it says that it becomes {size:,} bytes, not {len(into):,}")
        inner.decode_block(data, into)


def block_undo(stored: StoredItem, key: str, registry: ExtensionRegistry) -> BlockUndo:
    """What undoes the chain of an item in encoded blocks.

    Raises:
        UnsupportedFormatError: A transform is not known, or is not one of blocks.
    """
    transforms = transforms_of(stored, key, registry)
    for descriptor, transform in zip(stored.chain, transforms, strict=True):
        if not hasattr(transform, "decode_block"):
            raise UnsupportedFormatError(f"{key!r} in {stored.file}: the transform {descriptor!r} is not one of blocks")
    return BlockUndo(cast("Sequence[BlockTransformExtension]", transforms))


def block_bytes(nbytes: int) -> int:
    """Into blocks of how many bytes a tensor of `nbytes` is cut: a power of two, so that elements stay whole."""
    wanted = 1 << max(nbytes // _BLOCKS_PER_ITEM, 1).bit_length() - 1
    return min(max(wanted, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)

"""Transforms of blocks, which let a reader decode a part of a stored tensor: the contract, and chains of them.

Which items are transformed is decided in `compression`; the storage engine cuts, stores and checks the blocks.
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
# An encoded block may be longer between two transforms of a chain than at its end, but not by much.
_MARGIN_BYTES = 64 << 10


class BlockTransformExtension(Extension):
    """A transform of the blocks of a tensor's bytes, for compression: blocks that do not shrink are stored as they are.

    (A transform that must apply to all items, such as encryption, is a `StreamTransformExtension`.) Several threads use
    one instance at once. Encoding and decoding should release the GIL.
    """

    def for_item(self, sample: memoryview, dtype: str) -> tuple[BlockTransformExtension, float]:
        """Return the transform for one tensor, and the estimated ratio of encoded to original size.

        Args:
            sample: Sample of the tensor's elements.
            dtype: Dtype of the elements, as in `encode_block`.

        Returns:
            This transform, or another with the same descriptor and with settings that suit the sample; and the ratio.
        """
        return self, len(self.encode_block(sample, dtype)) / len(sample)

    @abstractmethod
    def encode_block(self, block: memoryview, dtype: str) -> bytes | bytearray | memoryview:
        """Return the block, encoded; its memory may be reused for the next block of the same thread.

        Args:
            block: Bytes of whole elements; at most 1 MiB.
            dtype: Name of the elements' torch dtype without `torch.`; `uint8` for the output of another transform.
        """

    @abstractmethod
    def decoded_bytes(self, data: memoryview) -> int:
        """Return the decoded size of an encoded block in bytes. Raises ValueError if `data` is not an encoded block."""

    @abstractmethod
    def decode_block(self, data: memoryview, into: memoryview) -> None:
        """Decode a block into `into`, of `decoded_bytes(data)` bytes; needs at most a small multiple of both as memory.

        Raises:
            Exception: The data are damaged. (Their CRC was checked before: they are the bytes that were written.)
        """


class BlockChain:
    """The chain of transforms for the blocks of one tensor; satisfies `dcp_manifest.BlockEncoder`.

    Args:
        transforms: Transforms of the chain: the first one makes the stored bytes, the last one gets the tensor's
            elements.
        dtype: Dtype of the elements.
        block_bytes: Size of each block before it is encoded.
    """

    __slots__ = ("_dtype", "_transforms", "block_bytes", "descriptors")

    def __init__(self, transforms: Sequence[BlockTransformExtension], dtype: str, block_bytes: int) -> None:
        self._transforms = tuple(transforms)
        self._dtype = dtype
        self.block_bytes = block_bytes
        self.descriptors = tuple(each.get_descriptor() for each in transforms)

    def encode(self, block: memoryview) -> bytes | bytearray | memoryview:
        """Encode one block by all transforms of the chain."""
        data: bytes | bytearray | memoryview = block
        dtype = self._dtype
        for transform in reversed(self._transforms):
            data = transform.encode_block(memoryview(data), dtype)
            dtype = "uint8"
        return data


class BlockUndo:
    """The decoder of a chain of block transforms; satisfies `dcp_manifest.BlockDecoder`.

    Allocates no memory before its size is checked.

    Args:
        transforms: Transforms in the order in which they are undone.
    """

    __slots__ = ("_transforms",)

    def __init__(self, transforms: Sequence[BlockTransformExtension]) -> None:
        self._transforms = tuple(transforms)

    def decode(self, data: memoryview, into: memoryview) -> None:
        """Decode a block into `into`. Raises ValueError if the result has another length."""
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
    """Return the decoder for an item in encoded blocks.

    Raises:
        UnsupportedFormatError: A transform is not known, or is not a transform of blocks.
    """
    transforms = transforms_of(stored, key, registry)
    for descriptor, transform in zip(stored.chain, transforms, strict=True):
        if not hasattr(transform, "decode_block"):
            raise UnsupportedFormatError(f"{key!r} in {stored.file}: the transform {descriptor!r} is not one of blocks")
    return BlockUndo(cast("Sequence[BlockTransformExtension]", transforms))


def block_bytes(nbytes: int) -> int:
    """Return the block size in bytes for a tensor of `nbytes`: a power of two, so that no element is cut."""
    wanted = 1 << max(nbytes // _BLOCKS_PER_ITEM, 1).bit_length() - 1
    return min(max(wanted, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)

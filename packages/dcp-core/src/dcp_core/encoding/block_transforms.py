"""Transforms of blocks: their contract, chains of several transforms, and decoding.

Blocks are encoded separately, so a reader can decode only the blocks of a tensor that it needs. `compression` decides
which items are transformed; the storage engine splits items into blocks, and stores and checks the blocks.
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
    """Contract of a transform that encodes blocks of a tensor's bytes, for compression.

    Blocks that do not become smaller are stored unencoded, so encryption must be a `StreamTransformExtension` instead.
    Several threads use one instance at the same time. Encoding and decoding should release the GIL.
    """

    def for_item(self, sample: memoryview, dtype: str) -> tuple[BlockTransformExtension, float]:
        """Return the transform for one tensor, and the estimated ratio of encoded to original size.

        Args:
            sample: Bytes of a sample of the tensor's elements.
            dtype: Name of the elements' torch dtype without `torch.`, such as `float32`.

        Returns:
            This transform, or another one with the same descriptor and settings that suit the sample; and the ratio.
        """
        return self, len(self.encode_block(sample, dtype)) / len(sample)

    @abstractmethod
    def encode_block(self, block: memoryview, dtype: str) -> bytes | bytearray | memoryview:
        """Return the encoded bytes of a block; their memory may be reused by the next call in the same thread.

        Args:
            block: Bytes of whole elements; at most 1 MiB.
            dtype: Name of the elements' torch dtype without `torch.`; `uint8` for the output of another transform.
        """

    @abstractmethod
    def decoded_bytes(self, data: memoryview) -> int:
        """Return the decoded size of an encoded block in bytes. Raises ValueError if `data` is not an encoded block."""

    @abstractmethod
    def decode_block(self, data: memoryview, into: memoryview) -> None:
        """Decode a block.

        Args:
            data: Encoded block, whose CRC has been checked.
            into: Writable memory of `decoded_bytes(data)` bytes for the decoded block.

        Raises:
            Exception: The block cannot be decoded.
        """


class BlockChain:
    """Encoder of one tensor's blocks by a chain of transforms; implements `dcp_manifest.BlockEncoder`.

    Args:
        transforms: Transforms of the chain: the last one encodes the tensor's bytes, the first one produces the stored
            bytes.
        dtype: Name of the elements' torch dtype without `torch.`.
        block_bytes: Size in bytes of each block before encoding.
    """

    __slots__ = ("_dtype", "_transforms", "block_bytes", "descriptors")

    def __init__(self, transforms: Sequence[BlockTransformExtension], dtype: str, block_bytes: int) -> None:
        self._transforms = tuple(transforms)
        self._dtype = dtype
        self.block_bytes = block_bytes
        self.descriptors = tuple(each.get_descriptor() for each in transforms)

    def encode(self, block: memoryview) -> bytes | bytearray | memoryview:
        """Return one block encoded by all transforms of the chain."""
        data: bytes | bytearray | memoryview = block
        dtype = self._dtype
        for transform in reversed(self._transforms):
            data = transform.encode_block(memoryview(data), dtype)
            dtype = "uint8"
        return data


class BlockUndo:
    """Decoder of blocks that a chain of transforms has encoded; implements `dcp_manifest.BlockDecoder`.

    Memory is allocated only after its size has been checked against the expected size.

    Args:
        transforms: Transforms in the order in which they decode.
    """

    __slots__ = ("_transforms",)

    def __init__(self, transforms: Sequence[BlockTransformExtension]) -> None:
        self._transforms = tuple(transforms)

    def decode(self, data: memoryview, into: memoryview) -> None:
        """Decode an encoded block into the memory `into`. Raises ValueError if the decoded length differs from it."""
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
    """Return the decoder for an item that is stored in encoded blocks.

    Args:
        stored: Record of the item in the index, which names the transforms.
        key: FQN of the tensor, for error messages.
        registry: Registry of the transforms.

    Raises:
        UnsupportedFormatError: A transform is not installed, or is not a transform of blocks.
    """
    transforms = transforms_of(stored, key, registry)
    for descriptor, transform in zip(stored.chain, transforms, strict=True):
        if not hasattr(transform, "decode_block"):
            raise UnsupportedFormatError(f"{key!r} in {stored.file}: the transform {descriptor!r} is not one of blocks")
    return BlockUndo(cast("Sequence[BlockTransformExtension]", transforms))


def block_bytes(nbytes: int) -> int:
    """Return the size in bytes of the blocks of a tensor of `nbytes` bytes: a power of two, so no element is split."""
    wanted = 1 << max(nbytes // _BLOCKS_PER_ITEM, 1).bit_length() - 1
    return min(max(wanted, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)

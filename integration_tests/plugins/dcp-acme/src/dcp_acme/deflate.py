"""Deflate over blocks: 8 bytes with the decoded length, then the stream of zlib."""

from __future__ import annotations

import struct
import zlib

from dcp_core.block_transforms import BlockTransformExtension

__all__ = ["BlockDeflate"]

_NAME, _VERSION = "block.acme-deflate", "1"
_LENGTH = struct.Struct("<Q")


class BlockDeflate(BlockTransformExtension):
    """Compresses each block of a tensor with zlib: a slice decodes its blocks only.

    Args:
        level: From 1 (fast) to 9 (small).
    """

    def __init__(self, level: int = 1) -> None:
        self.level = level

    @staticmethod
    def registry_name() -> str:
        """The name under which the hook registers it."""
        return _NAME

    @staticmethod
    def from_descriptor(version: str) -> BlockDeflate:
        """The reader of that version. Raises ValueError for later versions."""
        if version != _VERSION:
            raise ValueError(f"version {version!r}; version {_VERSION} is known")
        return BlockDeflate()

    def get_descriptor(self) -> str:
        """The name that checkpoints store."""
        return f"{_NAME}/{_VERSION}"

    def encode_block(self, block: memoryview, dtype: str) -> bytes:
        """The block, encoded."""
        del dtype
        return _LENGTH.pack(len(block)) + zlib.compress(block, self.level)

    def decoded_bytes(self, data: memoryview) -> int:
        """Return the length in the first bytes; the caller checks it."""
        if len(data) < _LENGTH.size:
            raise ValueError(f"{len(data)} bytes are too few for an encoded block")
        (size,) = _LENGTH.unpack_from(data)
        return int(size)

    def decode_block(self, data: memoryview, into: memoryview) -> None:
        """Fill `into`; never make more bytes than it has room for."""
        stream = zlib.decompressobj()
        decoded = stream.decompress(data[_LENGTH.size :], len(into) + 1)
        if len(decoded) != len(into):
            raise ValueError(
                f"the block becomes {len(decoded)} bytes or more, not {len(into)}"
            )
        into[:] = decoded

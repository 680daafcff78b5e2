"""Zstandard compression of blocks, for tensors with repetitions, such as tokens, masks and tables.

An encoded block is one Zstandard frame (RFC 8878) with the size of its content in the frame header.
"""

from __future__ import annotations

import zstandard

from dcp_core.block_transforms import BlockTransformExtension
from dcp_transforms.frames import FrameCompressor, decompress
from dcp_transforms.versioned import Versioned
from dcp_transforms.zstd import check_level


class BlockZStandard(Versioned, BlockTransformExtension):
    """Block transform that compresses tensors with Zstandard. To load a slice, only its blocks are read and decoded.

    Args:
        level: Compression level, from -100 (fastest) to 22 (smallest).

    Example:
        ```python
        import torch
        from dcp_core import save
        from dcp_fs import FileSystemWriter
        from dcp_transforms import BlockZStandard

        writer = FileSystemWriter("step-1", compression={torch.int64: BlockZStandard(level=10)})
        save({"tokens": torch.zeros(10_000, dtype=torch.int64)}, storage_writer=writer)
        ```
    """

    name = "block.zstd"

    def __init__(self, level: int = 3) -> None:
        check_level(level)
        self.level = level
        self._frames = FrameCompressor.at_level(level)

    def encode_block(self, block: memoryview, dtype: str) -> bytes:
        """Compress a block into one Zstandard frame."""
        del dtype
        return self._frames.compress(block)

    def decoded_bytes(self, data: memoryview) -> int:
        """Return the decoded length in bytes from the frame header."""
        try:
            size: int = zstandard.frame_content_size(data)
        except zstandard.ZstdError as error:
            raise ValueError(f"it is no Zstandard frame: {error}") from error
        return size

    def decode_block(self, data: memoryview, into: memoryview) -> None:
        """Decompress a frame into the buffer `into`."""
        into[:] = decompress(data, len(into))

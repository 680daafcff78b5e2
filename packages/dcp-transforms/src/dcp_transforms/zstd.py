"""Zstandard over the whole stream of an item, as `torch.distributed.checkpoint` writes and reads it, too.

Source: torch 2.13 `torch.distributed.checkpoint._extension.ZStandard` (name, descriptor, format: Zstandard frames, RFC
8878).
"""

from __future__ import annotations

from typing import IO, cast

import zstandard

from dcp_core.transforms import StreamTransformExtension
from dcp_transforms.versioned import Versioned

__all__ = ["ZStandard", "check_level"]

_MIN_LEVEL, _MAX_LEVEL = -100, 22


class ZStandard(Versioned, StreamTransformExtension):
    """Compresses each item as one Zstandard stream: a slice can only be read by decoding the whole item.

    Args:
        level: Compression level, from -100 (fastest) to 22 (smallest).
        threads: Number of threads that compress one item, in addition to the writer's own; 0 for none.
        checksum: Whether to add a checksum of the content to each item, which any reader checks. The checkpoint's own
            checksum covers the compressed bytes.

    Example:
        ```python
        import torch
        from dcp_core import save
        from dcp_fs import FileSystemWriter
        from dcp_transforms import ZStandard

        writer = FileSystemWriter("step-1", compression=ZStandard(level=10))  # readable by stock
        save({"tokens": torch.zeros(10_000, dtype=torch.int64)}, storage_writer=writer)
        ```
    """

    name = "stream.zstd"

    def __init__(self, level: int = 3, *, threads: int = 0, checksum: bool = True) -> None:
        check_level(level)
        if threads < 0:
            raise ValueError(f"threads={threads} cannot be negative")
        self.level = level
        self.threads = threads
        self.checksum = checksum

    @staticmethod
    def is_available() -> bool:
        """Return True: this package depends on Zstandard."""
        return True

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that compresses into `output`, and leaves it open."""
        compressor = zstandard.ZstdCompressor(
            level=self.level, threads=self.threads, write_checksum=self.checksum, write_content_size=False
        )
        return cast("IO[bytes]", compressor.stream_writer(output, closefd=False))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - stock's name
        """Return a stream that decompresses all frames of `input`, in bounded memory.

        Reading it raises `zstandard.ZstdError` if the input is no Zstandard or a checksum is wrong. If the input
        ends too early, the stream contains less than the original.
        """
        reader = zstandard.ZstdDecompressor().stream_reader(input, read_across_frames=True, closefd=False)
        return cast("IO[bytes]", reader)


def check_level(level: int) -> None:
    """Raise ValueError if Zstandard does not have this level."""
    if not _MIN_LEVEL <= level <= _MAX_LEVEL:
        raise ValueError(f"level={level} is not between {_MIN_LEVEL} and {_MAX_LEVEL}")

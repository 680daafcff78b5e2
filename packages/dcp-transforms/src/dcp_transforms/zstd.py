"""Zstandard compression of whole items as streams, in the format of `torch.distributed.checkpoint`.

Source: torch 2.13 `torch.distributed.checkpoint._extension.ZStandard` (name, descriptor, format: Zstandard frames, RFC
8878).
"""

from __future__ import annotations

from typing import IO, cast

import zstandard

from dcp_core.transforms import StreamTransformExtension
from dcp_transforms.versioned import Versioned

_MIN_LEVEL, _MAX_LEVEL = -100, 22


class ZStandard(Versioned, StreamTransformExtension):
    """Stream transform that compresses each item as one Zstandard stream. To load a slice, the whole item is decoded.

    Args:
        level: Compression level, from -100 (fastest) to 22 (smallest).
        threads: Number of additional threads that compress one item; 0 compresses in the writer thread.
        checksum: Whether to add a checksum of the uncompressed content, which every Zstandard decoder checks. The
            checkpoint's own CRCs cover the compressed bytes.

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
        """Return True: this package installs Zstandard."""
        return True

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that compresses into `output`; closing it does not close `output`."""
        compressor = zstandard.ZstdCompressor(
            level=self.level, threads=self.threads, write_checksum=self.checksum, write_content_size=False
        )
        return cast("IO[bytes]", compressor.stream_writer(output, closefd=False))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - stock's name
        """Return a stream that decompresses all frames of `input`, in bounded memory.

        Reads raise `zstandard.ZstdError` if the input is not in Zstandard format or a checksum is wrong. If the input
        is truncated, the stream ends early, without an error.
        """
        reader = zstandard.ZstdDecompressor().stream_reader(input, read_across_frames=True, closefd=False)
        return cast("IO[bytes]", reader)


def check_level(level: int) -> None:
    """Raise ValueError if Zstandard does not have this level."""
    if not _MIN_LEVEL <= level <= _MAX_LEVEL:
        raise ValueError(f"level={level} is not between {_MIN_LEVEL} and {_MAX_LEVEL}")

"""Zstandard frames with one block each; every thread has its own compressor and decompressor."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

import zstandard

# The standard library's takes every parameter of Zstandard; `zstandard` decompresses faster, and knows streams.
if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# `ZSTD_c_literalCompressionMode` of zstd.h, which has no name in Python: 1 is always.
_LITERALS: Final = 1002

_decompressors: Final = threading.local()


class FrameCompressor:
    """Compress blocks into Zstandard frames with the content size in the header. Thread-safe."""

    __slots__ = ("_kept", "_options")

    def __init__(self, options: Mapping[int, int]) -> None:
        self._options = options
        self._kept = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return FrameCompressor, (self._options,)

    @classmethod
    def at_level(cls, level: int) -> FrameCompressor:
        """Return a compressor for a level from -100 (fastest) to 22 (smallest)."""
        return cls({zstd.CompressionParameter.compression_level: level})

    @classmethod
    def for_entropy(cls) -> FrameCompressor:
        """Return a compressor for data without repetitions."""
        options: dict[int, int] = {
            zstd.CompressionParameter.strategy: zstd.Strategy.fast,
            zstd.CompressionParameter.min_match: 7,
            zstd.CompressionParameter.hash_log: 7,
            zstd.CompressionParameter.window_log: 18,
        }
        # The longer Zstandard finds no match, the more it skips; skipped bytes are entropy-coded only if forced below.
        faster = cls({**options, zstd.CompressionParameter.target_length: 1024, _LITERALS: 1})
        try:
            faster.compress(b"")
        except (ValueError, zstd.ZstdError):  # a library to come, without that parameter
            return cls(options)
        return faster

    def compress(self, data: Any) -> bytes:
        """Compress a block into one frame."""
        compressor = getattr(self._kept, "compressor", None)
        if compressor is None:
            compressor = self._kept.compressor = zstd.ZstdCompressor(options=dict(self._options))
        frame: bytes = compressor.compress(data, compressor.FLUSH_FRAME)
        return frame


def decompress(frame: memoryview, size: int) -> bytes:
    """Decompress a frame with a content of `size` bytes.

    Raises ValueError, before any allocation, if the header has another size, or `zstandard.ZstdError`.
    """
    stated = zstandard.frame_content_size(frame)
    if stated != size:
        raise ValueError(f"a Zstandard frame says that it has {stated:,} bytes, not {size:,}")
    decompressor = getattr(_decompressors, "kept", None)
    if decompressor is None:
        decompressor = _decompressors.kept = zstandard.ZstdDecompressor()
    content: bytes = decompressor.decompress(frame)
    return content

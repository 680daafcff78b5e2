"""Zstandard frames of one block, made and read by objects that each thread keeps."""

from __future__ import annotations

import threading
from typing import Any, Final

import zstandard

__all__ = ["FrameCompressor", "decompress"]

_decompressors: Final = threading.local()


class FrameCompressor:
    """Compresses blocks, each into a frame that says how long its content is. Used by several threads at once.

    Args:
        settings: Of `zstandard.ZstdCompressionParameters`, or the `level`.
    """

    __slots__ = ("_kept", "_settings")

    def __init__(self, **settings: int) -> None:
        self._settings = settings
        self._kept = threading.local()

    def compress(self, data: Any) -> bytes:
        """One frame."""
        compressor = getattr(self._kept, "compressor", None)
        if compressor is None:
            compressor = self._kept.compressor = self._make()
        frame: bytes = compressor.compress(data)
        return frame

    def _make(self) -> zstandard.ZstdCompressor:
        settings = dict(self._settings)
        level = settings.pop("level", None)
        if level is not None:
            return zstandard.ZstdCompressor(level=level)
        return zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(**settings))


def decompress(frame: memoryview, size: int) -> bytes:
    """The content of a frame, of which `size` bytes are expected.

    Raises:
        ValueError: The frame says that its content has another length; nothing was allocated for it.
        zstandard.ZstdError: It is damaged.
    """
    told = zstandard.frame_content_size(frame)
    if told != size:
        raise ValueError(f"a Zstandard frame says that it has {told:,} bytes, not {size:,}")
    decompressor = getattr(_decompressors, "kept", None)
    if decompressor is None:
        decompressor = _decompressors.kept = zstandard.ZstdDecompressor()
    content: bytes = decompressor.decompress(frame)
    return content

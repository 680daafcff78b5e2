"""CRC32 checksums. The only module that imports isal, which is faster than `zlib`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from dcp_manifest.index.columns import StoredItem, block_bytes, border_count
from dcp_manifest.types import Buffer

_NO_BORDERS: Final[npt.NDArray[np.uint32]] = np.zeros(0, np.uint32)
_NO_BORDERS.flags.writeable = False


crc32: Callable[..., int] = isal_zlib.crc32
"""Return the CRC32 of `data`, continued from `value`; long data release the GIL."""
combine: Callable[[int, int, int], int] = isal_zlib.crc32_combine
"""Return the CRC32 of concatenated ranges."""


class RunningCrc:
    """CRC32 of `stored_bytes` bytes that arrive in pieces, with its value at every interior block border."""

    __slots__ = ("_block", "_borders", "_length", "_position", "value")

    def __init__(self, stored_bytes: int) -> None:
        self._length = stored_bytes
        self._block = block_bytes(stored_bytes)
        self._borders: list[int] = []
        self._position = 0
        self.value = 0

    def update(self, data: Buffer) -> None:
        """Add a piece; ValueError if there are too many bytes."""
        size = len(data)
        if self._position + size > self._length:
            raise ValueError(f"more bytes than the {self._length} that were announced")
        value, position, start = self.value, self._position, 0
        view = data if size <= self._block else memoryview(data)
        while start < size:
            stop = min(size, start + self._block - position % self._block)
            value = isal_zlib.crc32(view[start:stop] if stop - start < size else view, value)
            position += stop - start
            start = stop
            if position % self._block == 0 and position < self._length:
                self._borders.append(value)
        self.value, self._position = value, position

    def borders(self) -> npt.NDArray[np.uint32]:
        """Return the CRC32 up to each block border; ValueError if bytes are missing."""
        if self._position != self._length:
            raise ValueError(f"{self._length - self._position} of {self._length} bytes have not arrived")
        return np.array(self._borders, np.uint32) if self._borders else _NO_BORDERS


def running_crcs(buffers: Sequence[Buffer]) -> tuple[int, npt.NDArray[np.uint32]]:
    """Return the CRC32 of buffers, and up to each interior block border."""
    running = RunningCrc(sum(map(len, buffers)))
    for buffer in buffers:
        running.update(buffer)
    return running.value, running.borders()


def crc_at(item: StoredItem, position: int) -> int:
    """Return the CRC32 of an item's first bytes; ValueError if unknown."""
    if position == 0:
        return 0
    if position == item.stored_bytes and item.crc32 is not None:
        return item.crc32
    border, rest = divmod(position, block_bytes(item.stored_bytes))
    if rest or item.running_crcs is None or not 0 < border <= border_count(item.stored_bytes):
        raise ValueError(f"no CRC is recorded at byte {position} of {item.stored_bytes}")
    return int(item.running_crcs[border - 1])

"""Manifest container in a file: rows of columns are read on demand, and verified by the CRCs of their blocks."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dcp_manifest.container.blob import (
    BLOCK_BYTES,
    BLOCK_CRCS,
    PREFIX_BYTES,
    Column,
    Unsigned,
    first_blocks,
    header_length,
    parse_header,
)
from dcp_manifest.container.footer import Footer
from dcp_manifest.errors import CorruptCheckpointError

__all__ = ["LazyBlob", "ReadRange", "read_exactly"]

ReadRange = Callable[[int, int], bytes]
"""Function that reads bytes of a file: (offset, length) → bytes."""
_CRC_DTYPE = "<u4"
_FIRST_READ_BYTES = 16 * 1024


class LazyBlob:
    """A manifest's blob in a file; only its header and its block CRCs are in memory.

    Args:
        read: Function (offset, length) → bytes of the file.
        footer: Footer of the file.
        file: Name of the file, for messages.

    Raises:
        CorruptCheckpointError: The header or the block CRCs are damaged.
    """

    def __init__(self, read: ReadRange, footer: Footer, *, file: str) -> None:
        self.file = file
        self._read = read
        self._start = footer.manifest_offset
        beginning = self._beginning(footer.manifest_bytes)
        self.header = parse_header(
            beginning[PREFIX_BYTES:], data_bytes=footer.manifest_bytes - len(beginning), file=file
        )
        column = self.header.columns.get(BLOCK_CRCS)
        if column is not None and column.dtype != _CRC_DTYPE:
            raise CorruptCheckpointError("the manifest's block CRCs are not 32-bit numbers", file=file)
        crcs = b"" if column is None else self._bytes(column, 0, column.stop - column.start)
        if zlib.crc32(crcs, zlib.crc32(beginning)) != footer.index_crc32:
            raise CorruptCheckpointError("the manifest's header is damaged", file=file, offset=self._start)
        self._crcs: npt.NDArray[np.uint32] = np.frombuffer(crcs, _CRC_DTYPE)
        self._first, total = first_blocks(self.header)
        if total != len(self._crcs):
            raise CorruptCheckpointError(f"the manifest has {len(self._crcs)} block CRCs, not {total}", file=file)

    def read(self, name: str, start: int, stop: int) -> Unsigned:
        """Read rows [start, stop) of a column, verified by the CRCs of their blocks, in the stored dtype."""
        column = self.header.columns[name]
        if start >= stop:
            return np.zeros(0, np.uint8)
        width = np.dtype(column.dtype).itemsize
        first, last = start * width // BLOCK_BYTES, -(-stop * width // BLOCK_BYTES)
        data = self._bytes(column, first * BLOCK_BYTES, min(last * BLOCK_BYTES, column.stop - column.start))
        for block in range(first, last):
            place = (block - first) * BLOCK_BYTES
            if zlib.crc32(data[place : place + BLOCK_BYTES]) != self._crcs[self._first[name] + block]:
                offset = self._start + self.header.data_start + column.start + block * BLOCK_BYTES
                raise CorruptCheckpointError(f"the column {name} is damaged", file=self.file, offset=offset)
        skipped = start - first * BLOCK_BYTES // width
        numbers: Unsigned = np.frombuffer(data, column.dtype)[skipped : skipped + stop - start]
        return numbers

    def _beginning(self, size: int) -> bytes:
        """Read the length prefix and the header."""
        data = read_exactly(self._read, self._start, min(size, _FIRST_READ_BYTES), file=self.file)
        needed = PREFIX_BYTES + header_length(data[:PREFIX_BYTES], size=size, file=self.file)
        if needed > len(data):
            data += read_exactly(self._read, self._start + len(data), needed - len(data), file=self.file)
        return data[:needed]

    def _bytes(self, column: Column, start: int, stop: int) -> bytes:
        offset = self._start + self.header.data_start + column.start
        return read_exactly(self._read, offset + start, stop - start, file=self.file)


def read_exactly(read: ReadRange, offset: int, length: int, *, file: str) -> bytes:
    """Read exactly `length` bytes of a file. Raises CorruptCheckpointError if the file is too short."""
    data = read(offset, length)
    if len(data) != length:
        raise CorruptCheckpointError(f"the file ends after {len(data)} of {length} bytes", file=file, offset=offset)
    return data

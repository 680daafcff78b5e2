"""Writer of zip archives like those of `torch.save`, without torch: uncompressed records, written sequentially.

The bytes of a record may arrive in pieces, since its CRC is written after its bytes. The framing of a single tensor is
in `tensor_archive`.

Source: torch 2.13 `torch.serialization` (64-byte alignment by padding).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from dcp_io.archives.crc import crc32
from dcp_io.archives.zip_format import (
    central_header,
    descriptor,
    directory_end,
    local_header,
    zip64_directory_end,
)
from dcp_io.stores.store import Buffer, Sink

__all__ = ["ZipFileWriter"]

ALIGNMENT_BYTES = 64
# Small records are collected up to this size before they are passed to the storage.
_PACK_BYTES = 1 << 20


class ZipFileWriter:
    """Writer of a zip archive: `add` appends a record to a `Sink`, `finish` writes the archive's directory.

    Record names get the prefix `archive/`: `torch.load` requires a folder. The caller closes the sink after `finish`.

    Args:
        sink: A new `Sink`, to which nothing has been written.

    Example:
        ```python
        from dcp_io import LocalStore, ZipFileWriter

        store = LocalStore("archives")
        store.make()
        sink = store.create("numbers.zip")
        writer = ZipFileWriter(sink)
        writer.add("one", 3, [b"123"])
        writer.finish()
        sink.close(sync=True)
        ```
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._position = 0
        self._directory = bytearray()
        self._count = 0
        self._pending: list[Buffer] = []
        self._pending_bytes = 0

    def add(self, name: str, size: int, pieces: Iterable[Buffer]) -> int:
        """Append a record whose data begins at a multiple of 64 bytes.

        Args:
            name: Name of the record, within the archive's folder.
            size: Size of all pieces together, bytes.
            pieces: The record's data; each piece is written before the next piece is requested.

        Returns:
            The CRC32 of the record's data.

        Raises:
            ValueError: The pieces do not add up to `size`.
            OSError: The write to the storage failed.
        """
        full = f"archive/{name}".encode()
        start = self._position
        self._put(self._local(full, size))
        value = written = 0
        for piece in pieces:
            value = crc32(piece, value)
            written += len(piece)
            if len(piece) >= _PACK_BYTES:
                self._flush(piece)
                self._position += len(piece)
            else:
                self._put(bytes(piece))
        if written != size:
            raise ValueError(f"record {name!r} has {written} bytes; {size} were announced")
        self._put(descriptor(size, value))
        self._directory += central_header(full, size, value, start)
        self._count += 1
        return value

    def finish(self) -> None:
        """Write the archive's directory, and flush pending bytes to the sink."""
        start, size = self._position, len(self._directory)
        self._put(bytes(self._directory))
        self._put(zip64_directory_end(start, size, self._count) + directory_end(start, size, self._count))
        self._flush()

    def _local(self, name: bytes, size: int) -> bytes:
        """Return the header of a record, padded so that the data after it are aligned."""
        padding = -(self._position + len(local_header(name, size)) + 4) % ALIGNMENT_BYTES
        return local_header(name, size, extra=struct.pack("<2sH", b"FB", padding) + b"Z" * padding)

    def _put(self, data: Buffer) -> None:
        self._pending.append(data)
        self._pending_bytes += len(data)
        self._position += len(data)
        if self._pending_bytes >= _PACK_BYTES:
            self._flush()

    def _flush(self, *more: Buffer) -> None:
        head = [b"".join(self._pending)] if self._pending else []
        self._pending.clear()
        self._pending_bytes = 0
        if head or more:
            self._sink.write([*head, *more])

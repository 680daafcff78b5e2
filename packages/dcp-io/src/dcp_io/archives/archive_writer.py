"""An archive of several stored records, written front to back: what `torch.save` makes, without torch.

A record's bytes may come piece by piece; its CRC follows them. What frames a single tensor is in `tensor_archive`.

Source: PKWARE APPNOTE 6.3.10, sections 4.3 and 4.5; torch 2.13 `torch.serialization` (64-byte alignment by padding).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from dcp_io.archives.crc import crc32
from dcp_io.archives.tensor_archive import ZIP64_FROM_BYTES
from dcp_io.stores.store import Buffer, Sink

__all__ = ["ZipFileWriter"]

ALIGNMENT_BYTES = 64
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_ZIP64_END = struct.Struct("<4sQHHIIQQQQ")
_ZIP64_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_VERSION, _ZIP64_VERSION = 20, 45
_HAS_DESCRIPTOR = 0x0008
_DATE = 0x0021
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
# So many bytes of small records are collected before they are handed to the storage.
_PACK_BYTES = 1 << 20


class ZipFileWriter:
    """Appends stored records to a sink; `finish` writes the directory. Closing the sink is the caller's.

    Args:
        sink: A new object; nothing has been written to it.
        root: The folder in the archive that every record lies in.
    """

    def __init__(self, sink: Sink, *, root: str = "archive") -> None:
        self._sink = sink
        self._root = root
        self._position = 0
        self._directory = bytearray()
        self._count = 0
        self._pending: list[Buffer] = []
        self._pending_bytes = 0

    def add(self, name: str, size: int, pieces: Iterable[Buffer]) -> int:
        """Append a record whose data begins at a multiple of 64 bytes.

        Args:
            name: Within the archive's folder.
            size: Bytes of all pieces together.
            pieces: The data; each piece is used up before the next is asked for.

        Returns:
            The data's CRC32.

        Raises:
            ValueError: The pieces have another length.
            OSError: The storage refused.
        """
        full = f"{self._root}/{name}".encode()
        start = self._position
        wide = size >= ZIP64_FROM_BYTES
        self._put(self._local(full, size, wide=wide))
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
        self._put(struct.pack("<4sI", b"PK\x07\x08", value) + struct.pack("<QQ" if wide else "<II", size, size))
        self._directory += _central(full, size, value, start)
        self._count += 1
        return value

    def finish(self) -> None:
        """Write the directory and hand over what is pending."""
        start, size = self._position, len(self._directory)
        self._put(bytes(self._directory))
        count = self._count
        self._put(_ZIP64_END.pack(b"PK\x06\x06", 44, _ZIP64_VERSION, _ZIP64_VERSION, 0, 0, count, count, size, start))
        self._put(_ZIP64_LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1))
        few = min(count, _MAX16)
        self._put(_END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, _MAX32), min(start, _MAX32), 0))
        self._flush()

    def _local(self, name: bytes, size: int, *, wide: bool) -> bytes:
        """The header of a record, padded so that the data behind it is aligned."""
        extra = struct.pack("<HHQQ", 1, 16, size, size) if wide else b""
        bare = self._position + _LOCAL.size + len(name) + len(extra) + 4
        padding = -bare % ALIGNMENT_BYTES
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        field = _MAX32 if wide else size
        version = _ZIP64_VERSION if wide else _VERSION
        fields = (b"PK\x03\x04", version, _HAS_DESCRIPTOR, 0, 0, _DATE, 0, field, field, len(name), len(extra))
        return _LOCAL.pack(*fields) + name + extra

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


def _central(name: bytes, size: int, crc: int, start: int) -> bytes:
    """A record's entry in the directory; numbers that do not fit go into the zip64 field."""
    wide_size, wide_start = size >= ZIP64_FROM_BYTES, start >= ZIP64_FROM_BYTES
    numbers = ([size, size] if wide_size else []) + ([start] if wide_start else [])
    extra = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    version = _ZIP64_VERSION if numbers else _VERSION
    field = _MAX32 if wide_size else size
    at = _MAX32 if wide_start else start
    fields = (b"PK\x01\x02", version, version, _HAS_DESCRIPTOR, 0, 0, _DATE, crc, field, field, len(name), len(extra))
    return _CENTRAL.pack(*fields, 0, 0, 0, 0, at) + name + extra

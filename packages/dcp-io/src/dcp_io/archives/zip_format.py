"""Headers of zip archives: packing and parsing. The data between the headers are handled elsewhere.

Sizes and positions above 32 bits go into zip64 fields; `ZIP64_FROM_BYTES` leaves room for the headers around a payload.

Source: PKWARE APPNOTE 6.3.10, sections 4.3 and 4.5.
"""

from __future__ import annotations

import struct

__all__ = [
    "CENTRAL",
    "END",
    "LOCAL",
    "MAX16",
    "MAX32",
    "ZIP64_END",
    "ZIP64_FROM_BYTES",
    "ZIP64_LOCATOR",
    "central_header",
    "descriptor",
    "directory_end",
    "is_wide",
    "is_zip",
    "local_header",
    "local_lengths",
    "zip64_directory_end",
]

Buffer = bytes | bytearray | memoryview
MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF
ZIP64_FROM_BYTES = MAX32 - 4096
"""Smallest size or position, in bytes, that is written as a 64-bit field; see `is_wide`."""
LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
ZIP64_END = struct.Struct("<4sQHHIIQQQQ")
ZIP64_LOCATOR = struct.Struct("<4sIQI")
_MAGIC = b"PK\x03\x04"
_VERSION, _ZIP64_VERSION = 20, 45
_HAS_DESCRIPTOR = 0x0008
_DATE = 0x0021  # 1 January 1980, the earliest that the format can express


def is_zip(data: Buffer) -> bool:
    """Whether the bytes begin with the magic bytes of a zip archive."""
    return bytes(data[:4]) == _MAGIC


def is_wide(number: int) -> bool:
    """Whether a size or a position needs a 64-bit field."""
    return number >= ZIP64_FROM_BYTES


def local_lengths(header: Buffer) -> tuple[int, int] | None:
    """Return the lengths (bytes) of name and extra field in a local header; None if the bytes are no local header."""
    if len(header) < LOCAL.size or not is_zip(header):
        return None
    *_, name_bytes, extra_bytes = LOCAL.unpack_from(header)
    return name_bytes, extra_bytes


def local_header(
    name: bytes, size: int, *, crc: int | None = None, extra: bytes = b"", says_size: bool = True
) -> bytes:
    """Return the local header, which precedes the stored data of a record.

    Args:
        name: Name of the record.
        size: Size of the record's data, bytes.
        crc: CRC32 of the data; None if the CRC follows the data, in a `descriptor`.
        extra: Extra fields to append.
        says_size: Whether the header has the 32-bit size even if a `descriptor` follows.
    """
    wide = is_wide(size)
    extra = (struct.pack("<HHQQ", 1, 16, size, size) if wide else b"") + extra
    version, field = (_ZIP64_VERSION, MAX32) if wide else (_VERSION, size if says_size else 0)
    flags = _HAS_DESCRIPTOR if crc is None else 0
    fields = (_MAGIC, version, flags, 0, 0, _DATE, crc or 0, field, field, len(name), len(extra))
    return LOCAL.pack(*fields) + name + extra


def descriptor(size: int, crc: int) -> bytes:
    """Return the data descriptor (CRC and sizes) that follows a record whose header was written before its CRC."""
    return struct.pack("<4sI" + ("QQ" if is_wide(size) else "II"), b"PK\x07\x08", crc, size, size)


def central_header(name: bytes, size: int, crc: int, start: int, *, described: bool = True) -> bytes:
    """Return a record's entry in the directory.

    Args:
        name: Name of the record.
        size: Size of the record's data, bytes.
        crc: CRC32 of the data.
        start: Position of the record's local header in the archive, bytes.
        described: Whether a `descriptor` follows the data.
    """
    wide_size, wide_start = is_wide(size), is_wide(start)
    numbers = ([size, size] if wide_size else []) + ([start] if wide_start else [])
    extra = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    version = _ZIP64_VERSION if numbers else _VERSION
    field, at = MAX32 if wide_size else size, MAX32 if wide_start else start
    flags = _HAS_DESCRIPTOR if described else 0
    fields = (b"PK\x01\x02", version, version, flags, 0, 0, _DATE, crc, field, field, len(name), len(extra))
    return CENTRAL.pack(*fields, 0, 0, 0, 0, at) + name + extra


def directory_end(start: int, size: int, count: int) -> bytes:
    """Return the end-of-directory record of an archive; a number that does not fit is in the zip64 record before it.

    Args:
        start: Position of the directory in the archive, bytes.
        size: Size of the directory, bytes.
        count: Number of records.
    """
    few = min(count, MAX16)
    return END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, MAX32), min(start, MAX32), 0)


def zip64_directory_end(start: int, size: int, count: int) -> bytes:
    """Return the zip64 record before `directory_end`, for 64-bit numbers; it takes the arguments of `directory_end`."""
    version = _ZIP64_VERSION
    return ZIP64_END.pack(b"PK\x06\x06", 44, version, version, 0, 0, count, count, size, start) + ZIP64_LOCATOR.pack(
        b"PK\x06\x07", 0, start + size, 1
    )

"""Reading and checking zip archives of other writers: where their records lie, and whether their CRCs hold.

Only what `torch.save` produces is understood: one file, no encryption, records stored or deflated.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from dcp_io.archives.crc import crc32
from dcp_manifest.errors import CorruptCheckpointError

__all__ = ["ZipRecord", "is_zip", "record_crc32", "verify_zip", "zip_records"]

_END = struct.Struct("<4sHHHHIIH")
_ZIP64_LOCATOR = struct.Struct("<4sIQI")
_ZIP64_END = struct.Struct("<4sQHHIIQQQQ")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_MAX_COMMENT_BYTES = 65535
_MAX16 = 0xFFFF
_MAX32 = 0xFFFFFFFF
_STORED, _DEFLATED = 0, 8
_STEP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record of an archive; `start` and `stored_bytes` give its data within the archive."""

    name: str
    crc32: int
    deflated: bool
    start: int
    stored_bytes: int
    bytes: int
    """Size once inflated."""


def is_zip(data: memoryview | bytes) -> bool:
    """Whether the bytes begin as an archive does."""
    return bytes(data[:4]) == b"PK\x03\x04"


def verify_zip(data: memoryview | bytes) -> bool | None:
    """Whether every record of an archive matches its CRC.

    Args:
        data: The whole archive, nothing around it.

    Returns:
        True or False (also for a damaged directory); None if its writer left the CRCs out, or if the bytes are no
        archive at all.
    """
    view = memoryview(data)
    if not is_zip(view):
        return None
    try:
        records = [record for record in zip_records(view) if record.bytes]
        if records and not any(record.crc32 for record in records):
            return None
        return all(record_crc32(view, record) == record.crc32 for record in records)
    except (CorruptCheckpointError, zlib.error):
        return False


def zip_records(data: memoryview | bytes) -> list[ZipRecord]:
    """The records of an archive, in the order of its directory.

    Raises:
        CorruptCheckpointError: The directory, or a record's header, is not there or is out of bounds.
    """
    view = memoryview(data)
    try:
        start, size, count = _directory(view)
        if start + size > len(view):
            raise CorruptCheckpointError("the archive's directory lies outside of it")
        records = list(_entries(view, start, start + size))
    except struct.error as error:
        raise CorruptCheckpointError("the archive ends inside a header") from error
    if len(records) != count:
        raise CorruptCheckpointError(f"the archive's directory has {len(records)} records; it promises {count}")
    return records


def _directory(view: memoryview) -> tuple[int, int, int]:
    """Start, length and number of records of the directory."""
    tail = bytes(view[-(_END.size + _MAX_COMMENT_BYTES) :])
    found = tail.rfind(b"PK\x05\x06")
    if found < 0:
        raise CorruptCheckpointError("the archive has no directory: it is truncated or damaged")
    end = len(view) - len(tail) + found
    _, _, _, _, count, size, start, _ = _END.unpack_from(view, end)
    locator = end - _ZIP64_LOCATOR.size
    if (count == _MAX16 or size == _MAX32 or start == _MAX32) and locator >= 0:
        magic, _, position, _ = _ZIP64_LOCATOR.unpack_from(view, locator)
        if magic == b"PK\x06\x07":
            if position + _ZIP64_END.size > len(view):
                raise CorruptCheckpointError("the archive's directory lies outside of it")
            fields = _ZIP64_END.unpack_from(view, position)
            count, size, start = fields[7:10]
    return start, size, count


def _entries(view: memoryview, position: int, end: int) -> Iterator[ZipRecord]:
    while position < end:
        fields = _CENTRAL.unpack_from(view, position)
        magic, method, crc, stored, size = fields[0], fields[4], fields[7], fields[8], fields[9]
        name_bytes, extra_bytes, comment_bytes, header = fields[10], fields[11], fields[12], fields[16]
        if magic != b"PK\x01\x02" or method not in (_STORED, _DEFLATED):
            raise CorruptCheckpointError("the archive's directory is damaged", offset=position)
        position += _CENTRAL.size
        name = bytes(view[position : position + name_bytes])
        extra = bytes(view[position + name_bytes : position + name_bytes + extra_bytes])
        size, stored, header = _wide(extra, size, stored, header)
        position += name_bytes + extra_bytes + comment_bytes
        start = _data_start(view, header, name)
        if start + stored > len(view) or (method == _STORED and size != stored):
            raise CorruptCheckpointError("a record lies outside of its archive", offset=header)
        yield ZipRecord(name.decode("utf-8", "replace"), crc, method == _DEFLATED, start, stored, size)


def _wide(extra: bytes, size: int, stored: int, header: int) -> tuple[int, int, int]:
    """The fields with those that say "see the zip64 extra field" replaced."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        position += 4
        if kind == 1:
            values = struct.iter_unpack("<Q", extra[position : position + length // 8 * 8])
            wide = [next(values)[0] if field == _MAX32 else field for field in (size, stored, header)]
            return wide[0], wide[1], wide[2]
        position += length
    return size, stored, header


def _data_start(view: memoryview, header: int, name: bytes) -> int:
    if header + _LOCAL.size > len(view):
        raise CorruptCheckpointError("a record lies outside of its archive", offset=header)
    fields = _LOCAL.unpack_from(view, header)
    start: int = header + _LOCAL.size + fields[9] + fields[10]
    if fields[0] != b"PK\x03\x04" or bytes(view[header + _LOCAL.size :][: fields[9]]) != name:
        raise CorruptCheckpointError("a record's header is damaged", offset=header)
    return start


def record_crc32(view: memoryview, record: ZipRecord) -> int | None:
    """CRC32 of a record's data once inflated; None if it does not have the promised size.

    Args:
        view: The whole archive.
        record: One of its records.

    Raises:
        zlib.error: The data cannot be inflated.
    """
    stored = view[record.start : record.start + record.stored_bytes]
    if not record.deflated:
        return crc32(stored)
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    value = size = 0
    pending: bytes | memoryview = stored
    while not inflate.eof:
        part = inflate.decompress(pending, _STEP_BYTES)
        pending = inflate.unconsumed_tail
        value, size = crc32(part, value), size + len(part)
        if size > record.bytes or (not part and not pending):
            break
    return value if inflate.eof and size == record.bytes else None

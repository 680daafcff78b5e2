"""Reader of `torch.save` archives: one file, not encrypted, records stored or deflated."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dcp_io.archives.crc import crc32
from dcp_io.archives.zip_format import (
    CENTRAL,
    END,
    LOCAL,
    MAX16,
    MAX32,
    ZIP64_END,
    ZIP64_LOCATOR,
    is_zip,
    local_lengths,
)
from dcp_manifest.errors import CorruptCheckpointError

_MAX_COMMENT_BYTES = 65535
_STORED, _DEFLATED, _ENCRYPTED = 0, 8, 1
_STEP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A zip archive's record: `stored_bytes` bytes from byte `start` of the archive on."""

    name: str
    crc32: int
    deflated: bool
    start: int
    stored_bytes: int
    bytes: int
    """Inflated size."""

    def find_crc32(self, archive: memoryview) -> int | None:
        """Return the CRC32 of the record's inflated data; None if their size is wrong. Raises zlib.error."""
        stored = archive[self.start : self.start + self.stored_bytes]
        if not self.deflated:
            return crc32(stored)
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        value = size = 0
        pending: bytes | memoryview = stored
        while not inflate.eof:
            part = inflate.decompress(pending, _STEP_BYTES)
            pending = inflate.unconsumed_tail
            value, size = crc32(part, value), size + len(part)
            if size > self.bytes or (not part and not pending):
                break
        return value if inflate.eof and size == self.bytes else None


def verify_zip(data: memoryview | bytes) -> bool | None:
    """Whether an archive's directory and CRCs are right; None without CRCs, or for other bytes."""
    view = memoryview(data)
    if not is_zip(view):
        return None
    try:
        records = zip_records(view)
        return _bad_record(view, records) is None if _has_crcs(records) else None
    except (CorruptCheckpointError, zlib.error):
        return False


def archive_problem(data: memoryview | bytearray | bytes) -> str | None:
    """Describe an archive's damage; None if it is sound, has no CRCs or is not a zip file."""
    view = memoryview(data)
    if not is_zip(view):
        return None
    try:
        records = zip_records(view)
        refuse_bomb(records, len(view))
        bad = _bad_record(view, records) if _has_crcs(records) else None
    except (CorruptCheckpointError, zlib.error) as error:
        return f"its archive cannot be read: {error}"
    return None if bad is None else f"the record {bad.name!r} of its archive does not match its CRC"


def refuse_bomb(records: Sequence[ZipRecord], nbytes: int) -> None:
    """Raise CorruptCheckpointError for overlapping records, or more than `nbytes`: `torch.save` does not compress."""
    if sum(record.bytes for record in records) > nbytes:
        raise CorruptCheckpointError("its records claim more bytes than the archive has")


def _has_crcs(records: Sequence[ZipRecord]) -> bool:
    filled = [record for record in records if record.bytes]
    return not filled or any(record.crc32 for record in filled)


def _bad_record(view: memoryview, records: Sequence[ZipRecord]) -> ZipRecord | None:
    return next((one for one in records if one.bytes and one.find_crc32(view) != one.crc32), None)


def zip_records(data: memoryview | bytes) -> list[ZipRecord]:
    """Return the records of a zip archive, in directory order.

    Raises CorruptCheckpointError if the directory or a record's header is missing or out of bounds.
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
        raise CorruptCheckpointError(f"the archive's directory lists {len(records)} records but announces {count}")
    return records


def _directory(view: memoryview) -> tuple[int, int, int]:
    for length in (END.size, END.size + _MAX_COMMENT_BYTES):  # few archives have a comment
        tail = bytes(view[-length:])
        found = tail.rfind(b"PK\x05\x06")
        if found >= 0:
            break
    else:
        raise CorruptCheckpointError("the archive has no directory: it is truncated or damaged")
    end = len(view) - len(tail) + found
    _, _, _, _, count, size, start, _ = END.unpack_from(view, end)
    locator = end - ZIP64_LOCATOR.size
    if (count == MAX16 or size == MAX32 or start == MAX32) and locator >= 0:
        magic, _, position, _ = ZIP64_LOCATOR.unpack_from(view, locator)
        if magic == b"PK\x06\x07":
            if position + ZIP64_END.size > len(view):
                raise CorruptCheckpointError("the archive's directory lies outside of it")
            fields = ZIP64_END.unpack_from(view, position)
            count, size, start = fields[7:10]
    return start, size, count


def _entries(view: memoryview, position: int, end: int) -> Iterator[ZipRecord]:
    while position < end:
        fields = CENTRAL.unpack_from(view, position)
        magic, flags, method, crc, stored, size = fields[0], fields[3], fields[4], *fields[7:10]
        name_bytes, extra_bytes, comment_bytes, header = fields[10], fields[11], fields[12], fields[16]
        if magic != b"PK\x01\x02" or method not in (_STORED, _DEFLATED) or flags & _ENCRYPTED:
            raise CorruptCheckpointError("the archive's directory is damaged", offset=position)
        position += CENTRAL.size
        name = bytes(view[position : position + name_bytes])
        extra = bytes(view[position + name_bytes : position + name_bytes + extra_bytes])
        size, stored, header = _wide(extra, size, stored, header)
        position += name_bytes + extra_bytes + comment_bytes
        start = _data_start(view, header, name)
        if start + stored > len(view) or (method == _STORED and size != stored):
            raise CorruptCheckpointError("a record lies outside of its archive", offset=header)
        yield ZipRecord(name.decode("utf-8", "replace"), crc, method == _DEFLATED, start, stored, size)


def _wide(extra: bytes, size: int, stored: int, header: int) -> tuple[int, int, int]:
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        position += 4
        if kind == 1:
            values = struct.iter_unpack("<Q", extra[position : position + length // 8 * 8])
            wide = [next(values)[0] if field == MAX32 else field for field in (size, stored, header)]
            return wide[0], wide[1], wide[2]
        position += length
    return size, stored, header


def _data_start(view: memoryview, header: int, name: bytes) -> int:
    if header + LOCAL.size > len(view):
        raise CorruptCheckpointError("a record lies outside of its archive", offset=header)
    start = header + LOCAL.size
    lengths = local_lengths(view[header:start])
    if lengths is None or bytes(view[start : start + lengths[0]]) != name:
        raise CorruptCheckpointError("a record's header is damaged", offset=header)
    return start + sum(lengths)


def inflated(view: memoryview, record: ZipRecord) -> bytes:
    """Return a record's inflated data; `refuse_bomb` must have bounded the memory.

    Raises CorruptCheckpointError or zlib.error.
    """
    data = bytes(view[record.start : record.start + record.stored_bytes])
    if record.deflated:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, record.bytes + 1)
    if len(data) != record.bytes or (record.crc32 and crc32(data) != record.crc32):
        raise CorruptCheckpointError(f"the record {record.name!r} is damaged", offset=record.start)
    return data

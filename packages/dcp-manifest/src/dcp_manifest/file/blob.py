"""Container of a manifest: named columns of unsigned numbers in a safetensors blob, and the footer of `.metadata`."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_manifest.errors import CorruptCheckpointError, UnsupportedFormatError
from dcp_manifest.types import U8, U32, U64, Buffer

BLOCK_BYTES = 64 * 1024
BLOCK_CRCS = "block_crcs"
"""CRC32 of each 64 KiB block of the other columns, which are sorted by name."""
_PREFIX_BYTES = 8
_METADATA_KEY = "dcp-manifest"
"""The only key, because the order of several is not stable."""

Unsigned = npt.NDArray[np.unsignedinteger[Any]]
_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}
_ALIGNMENT = 8
UTF8 = ("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Column:
    """Location of one column in a blob."""

    dtype: str
    """Numpy's name, such as `<u4`."""
    start: int
    stop: int
    count: int
    """1 if all rows are equal."""


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a blob."""

    metadata: Mapping[str, Any]
    columns: Mapping[str, Column]
    extents: Mapping[str, tuple[int, int]]
    """Start and end of each column in the data."""
    data_start: int
    data_bytes: int


class Blob:
    """A manifest's bytes, with a checked CRC. Raises CorruptCheckpointError for an invalid header."""

    def __init__(self, data: memoryview, *, file: str, size: int | None = None) -> None:
        self.data = data
        size = len(data) if size is None else size
        length = int.from_bytes(data[:_PREFIX_BYTES], "little")
        if size < _PREFIX_BYTES or length > size - _PREFIX_BYTES:
            raise CorruptCheckpointError(f"the manifest of {size} bytes has no room for its header", file=file)
        self.header = _parse_header(bytes(data[_PREFIX_BYTES : _PREFIX_BYTES + length]), size=size, file=file)

    def read(self, name: str) -> Unsigned:
        """Return a column, in the stored dtype."""
        column, data_start = self.header.columns[name], self.header.data_start
        numbers: Unsigned = np.frombuffer(self.data[data_start + column.start : data_start + column.stop], column.dtype)
        return numbers


@dataclass(frozen=True, slots=True)
class LateColumn:
    """A column of U32 that `write` puts into its place, so that it is in memory only once."""

    count: int
    write: Callable[[U32], None]


def pack(
    columns: Mapping[str, Unsigned | LateColumn], metadata: Mapping[str, Any], *, before: int = 0, after: int = 0
) -> tuple[bytearray, int]:
    """Pack columns, their block CRCs, and `metadata` (as JSON); return the blob and `index_crc32`.

    Equal input gives equal bytes. The blob has room for so many bytes `before` and `after` it.
    """
    forms, blocks = [], 0
    for name, column in columns.items():
        width, count = (4, column.count) if isinstance(column, LateColumn) else (column.itemsize, len(column))
        forms.append((-width, name, count))
        blocks -= -count * width // BLOCK_BYTES
    forms.append((-4, BLOCK_CRCS, blocks))
    text = json.dumps(dict(metadata), sort_keys=True, separators=(",", ":"))
    entries = [f'"__metadata__":{{"{_METADATA_KEY}":{json.dumps(text)}}}']
    places: dict[str, tuple[int, int]] = {}
    stop = 0
    # The safetensors library's order: wide columns first, so that each is aligned.
    for negative, name, count in sorted(forms):
        start, stop = stop, stop - negative * count
        places[name] = start, stop
        # Names are the schema's, so there is nothing to escape.
        entries.append(f'"{name}":{{"dtype":"U{-8 * negative}","shape":[{count}],"data_offsets":[{start},{stop}]}}')
    header = f"{{{','.join(entries)}}}".encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    begin = before + _PREFIX_BYTES + len(header)
    blob = bytearray(begin + stop + after)
    blob[before:begin] = len(header).to_bytes(_PREFIX_BYTES, "little") + header
    view, crcs = memoryview(blob)[begin:], []
    for name in sorted(columns):
        column, own = columns[name], view[slice(*places[name])]
        if isinstance(column, LateColumn):
            column.write(np.frombuffer(own, np.uint32))
        else:
            own[:] = np.ascontiguousarray(column).view(np.uint8).data
        crcs += [zlib.crc32(own[start : start + BLOCK_BYTES]) for start in range(0, len(own), BLOCK_BYTES)]
    view[slice(*places[BLOCK_CRCS])] = block_crcs = np.array(crcs, np.uint32).view(np.uint8).data
    return blob, zlib.crc32(block_crcs, zlib.crc32(memoryview(blob)[before:begin]))


def first_blocks(header: Header) -> tuple[dict[str, int], int]:
    """Return each column's first row in `block_crcs`, and the rows of `block_crcs`."""
    first: dict[str, int] = {}
    total = 0
    for name in sorted(header.extents):
        if name != BLOCK_CRCS:
            start, stop = header.extents[name]
            first[name] = total
            total += -(-(stop - start) // BLOCK_BYTES)
    return first, total


def index_crc32(blob: memoryview, header: Header) -> int:
    """Return the CRC32 of prefix, header and block CRCs."""
    crc = zlib.crc32(blob[: header.data_start])
    column = header.columns.get(BLOCK_CRCS)
    if column is not None:
        crc = zlib.crc32(blob[header.data_start + column.start : header.data_start + column.stop], crc)
    return crc


def _parse_header(text: bytes, *, size: int, file: str) -> Header:
    data_start = _PREFIX_BYTES + len(text)
    try:
        entries = json.loads(text)
        metadata = json.loads(entries.pop("__metadata__")[_METADATA_KEY])
        found = {name: _column(entry, size - data_start) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"the manifest's header is damaged: {error!r}", file=file) from error
    if not isinstance(metadata, dict):
        raise CorruptCheckpointError("the manifest's metadata is not a JSON object", file=file)
    columns = {name: column for name, column in found.items() if column.dtype}
    extents = {name: (column.start, column.stop) for name, column in found.items()}
    return Header(metadata, columns, extents, data_start, size - data_start)


def _column(entry: Mapping[str, Any], data_bytes: int) -> Column:
    start, stop = entry["data_offsets"]
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= data_bytes:
        raise ValueError(f"a column is stored at {start}–{stop} of {data_bytes} bytes")
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        return Column("", start, stop, 0)
    (count,) = entry["shape"]
    if type(count) is not int or count * np.dtype(dtype).itemsize != stop - start:
        raise ValueError(f"a column of {count} numbers has {stop - start} bytes")
    return Column(dtype, start, stop, count)


def pack_strings(strings: Iterable[str]) -> tuple[U8, U64]:
    """Return text and lengths."""
    encoded = [text.encode(*UTF8) for text in strings]
    lengths = np.fromiter(map(len, encoded), np.uint64, len(encoded))
    return np.frombuffer(b"".join(encoded), np.uint8), lengths


def unpack_strings(text: U8, lengths: npt.NDArray[np.int64]) -> list[str]:
    """Undo `pack_strings`; ValueError for wrong lengths or bytes."""
    if len(lengths) and int(lengths.max()) > len(text):
        raise ValueError(f"a string is longer than the text of {len(text)} bytes")
    if int(lengths.sum()) != len(text):
        raise ValueError(f"the strings have {int(lengths.sum())} bytes and the text has {len(text)}")
    data = text.tobytes()
    ends = np.cumsum(lengths)
    pairs = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    if data.isascii():
        whole = data.decode("ascii")
        return [whole[start:end] for start, end in pairs]
    return [data[start:end].decode(*UTF8) for start, end in pairs]


FOOTER_BYTES = 64
MAJOR = 3
"""CRCs of chunks are in the order of levels."""
MAJOR_WITH_RUNS = 2
MAJOR_WITHOUT_RUNS = 1
MINOR = 0
FLAG_STUB_HEAD = 1
"""Footer flag: the head raises an error in stock."""

_MAGIC = b"\x93DCPMAN\n"
_END_MAGIC = b"DCP\x93"
# The CRC of the footer covers all bytes before it. A new major version may change all but magics, version and this CRC.
_FIELDS = struct.Struct("<8sHHIQQIII12x")
_TAIL = struct.Struct("<I4s")


@dataclass(frozen=True, slots=True)
class Footer:
    """Footer of `.metadata`, its last 64 bytes; see `docs/format.md`."""

    manifest_offset: int
    """Length of the head in bytes."""
    manifest_bytes: int
    head_crc32: int
    manifest_crc32: int
    index_crc32: int
    flags: int = 0
    major: int = MAJOR_WITHOUT_RUNS
    minor: int = MINOR

    def to_bytes(self) -> bytes:
        """Return 64 bytes."""
        fields = _FIELDS.pack(
            _MAGIC,
            self.major,
            self.minor,
            self.flags,
            self.manifest_offset,
            self.manifest_bytes,
            self.head_crc32,
            self.manifest_crc32,
            self.index_crc32,
        )
        return fields + _TAIL.pack(zlib.crc32(fields), _END_MAGIC)


def read_footer(tail: Buffer, *, size: int, file: str) -> Footer | None:
    """Read a file's footer, and verify CRC and size; None if `tail` does not begin like a footer.

    Raises CorruptCheckpointError, or UnsupportedFormatError for a newer major version.
    """
    if len(tail) < FOOTER_BYTES:
        return None
    crc, end_magic = _TAIL.unpack_from(tail, _FIELDS.size)
    magic, major, minor, flags, offset, length, head_crc, manifest_crc, index_crc = _FIELDS.unpack_from(tail)
    if magic != _MAGIC and end_magic != _END_MAGIC:
        return None
    where = size - FOOTER_BYTES
    if magic != _MAGIC or end_magic != _END_MAGIC or crc != zlib.crc32(tail[: _FIELDS.size]):
        raise CorruptCheckpointError("the footer is damaged; restore the file from a copy", file=file, offset=where)
    if major > MAJOR:
        raise UnsupportedFormatError(
            f"{file} was written in manifest format {major}.{minor}, and this version of dcp-manifest reads formats up "
            f"to {MAJOR}.x: install a newer dcp-manifest"
        )
    if offset + length != where:
        raise CorruptCheckpointError(
            f"the footer expects {offset + length + FOOTER_BYTES} bytes and the file has {size}: bytes are missing or "
            "were inserted",
            file=file,
        )
    return Footer(offset, length, head_crc, manifest_crc, index_crc, flags, major, minor)

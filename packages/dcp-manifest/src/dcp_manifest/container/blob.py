"""Container of a manifest: named columns of unsigned numbers in a safetensors blob, with a CRC per 64 KiB block.

`manifest_write` and `manifest_read` define the columns. `pack` makes the blob, `parse_header` locates its columns.
`WholeBlob` reads from a blob in memory, `lazy_blob.LazyBlob` reads rows of columns from a file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from dcp_manifest.errors import CorruptCheckpointError

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_CRCS",
    "PREFIX_BYTES",
    "Blob",
    "Column",
    "Header",
    "WholeBlob",
    "first_blocks",
    "header_length",
    "index_crc32",
    "narrow",
    "pack",
    "parse_header",
]

BLOCK_BYTES = 64 * 1024
BLOCK_CRCS = "block_crcs"
"""Name of the column with the CRC32 of each 64 KiB block of all other columns, which are sorted by name."""
PREFIX_BYTES = 8
"""Length in bytes of the prefix of a safetensors blob, which is the length of the header as a little-endian u64."""
METADATA_KEY = "dcp-manifest"
"""Key of the only entry of the safetensors metadata, a JSON object. There is only one entry, since the order of several
entries is not stable."""

Unsigned = npt.NDArray[np.unsignedinteger[Any]]
_WIDTHS: tuple[type[np.unsignedinteger[Any]], ...] = (np.uint8, np.uint16, np.uint32, np.uint64)
_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}


@dataclass(frozen=True, slots=True)
class Column:
    """Location of one column in the blob of a manifest."""

    dtype: str
    """Numpy's name of the column's dtype, such as `<u4` (little-endian)."""
    start: int
    """Offset of the column's first byte in the blob's data, which follow the header."""
    stop: int
    count: int
    """Number of stored numbers: 1 for a column whose rows are all equal."""


@dataclass(frozen=True, slots=True)
class Header:
    """Parsed header of a manifest's blob."""

    metadata: Mapping[str, Any]
    columns: Mapping[str, Column]
    """Name → column of unsigned numbers; newer versions may add other columns."""
    extents: Mapping[str, tuple[int, int]]
    """Column name → offsets of the column's start and end in the blob's data; columns of all dtypes."""
    data_start: int
    """Offset in the blob, bytes, at which the header ends and the columns' data begin."""
    data_bytes: int


class Blob(Protocol):
    """Protocol of a manifest's blob (container), from which columns, or some of their rows, can be read."""

    file: str

    @property
    def header(self) -> Header:
        """Parsed header of the blob."""
        ...

    def read(self, name: str, start: int, stop: int) -> Unsigned:
        """Read rows [start, stop) of a column, verified by CRCs, in the stored dtype."""
        ...


class WholeBlob:
    """A manifest's blob in memory, whose CRC the caller has checked.

    Args:
        data: Bytes of the blob.
        file: Name of the file, for messages.

    Raises:
        CorruptCheckpointError: The blob has no valid header.
    """

    def __init__(self, data: memoryview, *, file: str) -> None:
        self.file = file
        self.data = data
        header_bytes = header_length(data[:PREFIX_BYTES], size=len(data), file=file)
        self.header = parse_header(
            bytes(data[PREFIX_BYTES : PREFIX_BYTES + header_bytes]),
            data_bytes=len(data) - PREFIX_BYTES - header_bytes,
            file=file,
        )

    def raw(self, name: str) -> memoryview:
        """Return all bytes of a column."""
        start, stop = self.header.extents[name]
        return self.data[self.header.data_start + start : self.header.data_start + stop]

    def read(self, name: str, start: int, stop: int) -> Unsigned:
        """Read rows [start, stop) of a column, in the stored dtype."""
        numbers: Unsigned = np.frombuffer(self.raw(name), self.header.columns[name].dtype)[start:stop]
        return numbers


def narrow(values: npt.NDArray[Any], *, collapse: bool = True) -> Unsigned:
    """Convert non-negative numbers to the narrowest unsigned dtype; if all are equal, they may become a single number.

    Args:
        values: One-dimensional array.
        collapse: Whether a column of equal numbers may be stored as one number.
    """
    if len(values) == 0:
        return np.zeros(0, np.uint8)
    top = int(values.max())
    if collapse and len(values) > 1 and top == int(values.min()):
        values = values[:1]
    width = next(width for width in _WIDTHS if top <= np.iinfo(width).max)
    return values.astype(width)


def pack(columns: Mapping[str, Unsigned], metadata: Mapping[str, Any]) -> bytes:
    """Pack columns, their block CRCs, and `metadata` (as JSON) into a blob. Equal input gives equal bytes."""
    ordered = {name: np.ascontiguousarray(columns[name]) for name in sorted(columns)}
    crcs = [
        zlib.crc32(raw[start : start + BLOCK_BYTES])
        for raw in (memoryview(column.view(np.uint8)) for column in ordered.values())  # type: ignore[arg-type]
        for start in range(0, len(raw), BLOCK_BYTES)
    ]
    ordered[BLOCK_CRCS] = np.array(crcs, np.uint32)
    text = json.dumps(dict(metadata), sort_keys=True, separators=(",", ":"))
    blob: bytes = save(ordered, {METADATA_KEY: text})
    return blob


def first_blocks(header: Header) -> tuple[dict[str, int], int]:
    """Return name of each column → row of its first block in `block_crcs`; and the number of rows of `block_crcs`."""
    first: dict[str, int] = {}
    total = 0
    for name in sorted(header.extents):
        if name != BLOCK_CRCS:
            start, stop = header.extents[name]
            first[name] = total
            total += -(-(stop - start) // BLOCK_BYTES)
    return first, total


def index_crc32(blob: memoryview, header: Header) -> int:
    """Return the CRC32 of length prefix, header and block CRCs; the block CRCs verify the rest of the blob."""
    crc = zlib.crc32(blob[: header.data_start])
    column = header.columns.get(BLOCK_CRCS)
    if column is not None:
        crc = zlib.crc32(blob[header.data_start + column.start : header.data_start + column.stop], crc)
    return crc


def header_length(prefix: bytes | memoryview, *, size: int, file: str) -> int:
    """Parse the header's length (bytes) from the `prefix` of a blob of `size` bytes.

    Raises:
        CorruptCheckpointError: The prefix is incomplete, or the header would exceed the blob.
    """
    length = int.from_bytes(prefix, "little")
    if len(prefix) < PREFIX_BYTES or length > size - PREFIX_BYTES:
        raise CorruptCheckpointError(f"the manifest of {size} bytes has no room for its header", file=file)
    return length


def parse_header(text: bytes, *, data_bytes: int, file: str) -> Header:
    """Parse the header of a blob, and check every number in it.

    Args:
        text: Text of the header, JSON.
        data_bytes: Length of the data that follow the header, bytes.
        file: Name of the file, for messages.

    Raises:
        CorruptCheckpointError: The text is not a valid header of a manifest.
    """
    try:
        entries = json.loads(text)
        metadata = json.loads(entries.pop("__metadata__")[METADATA_KEY])
        extents = {name: _extent(entry, data_bytes) for name, entry in entries.items()}
        known = {name: entry for name, entry in entries.items() if entry["dtype"] in _DTYPES}
        columns = {name: _column(entry, *extents[name]) for name, entry in known.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"the manifest's header is damaged: {error!r}", file=file) from error
    if not isinstance(metadata, dict):
        raise CorruptCheckpointError("the manifest's metadata is not a JSON object", file=file)
    return Header(metadata, columns, extents, PREFIX_BYTES + len(text), data_bytes)


def _extent(entry: Mapping[str, Any], data_bytes: int) -> tuple[int, int]:
    start, stop = entry["data_offsets"]
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= data_bytes:
        raise ValueError(f"a column is stored at {start}–{stop} of {data_bytes} bytes")
    return start, stop


def _column(entry: Mapping[str, Any], start: int, stop: int) -> Column:
    (count,) = entry["shape"]
    dtype = _DTYPES[entry["dtype"]]
    if type(count) is not int or count * np.dtype(dtype).itemsize != stop - start:
        raise ValueError(f"a column of {count} numbers has {stop - start} bytes")
    return Column(dtype, start, stop, count)

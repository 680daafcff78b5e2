"""Zip archives that `torch.load` opens: headers, a writer, and the frame around one tensor's bytes. No torch.

Source: PKWARE APPNOTE 6.3.10, sections 4.3 and 4.5; torch 2.13 `torch.serialization._save` and
`torch._utils._rebuild_tensor_v2`/`_v3` (what the pickle calls).
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcp_io.archives.crc import crc32
from dcp_io.stores.store import Sink
from dcp_manifest.index.dtypes import ITEM_BYTES, TYPED_STORAGES
from dcp_manifest.stock.stock_write import collected, global_2, integer, text_2
from dcp_manifest.types import Buffer

MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF
ZIP64_FROM_BYTES = MAX32 - 4096
"""Leaves room for headers."""
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
    """Whether the bytes begin like a zip archive."""
    return bytes(data[:4]) == _MAGIC


def local_lengths(header: Buffer) -> tuple[int, int] | None:
    """Return the lengths of name and extra field."""
    if len(header) < LOCAL.size or not is_zip(header):
        return None
    *_, name_bytes, extra_bytes = LOCAL.unpack_from(header)
    return name_bytes, extra_bytes


def local_header(
    name: bytes, size: int, *, crc: int | None = None, extra: bytes = b"", says_size: bool = True
) -> bytes:
    """Return a record's header."""
    wide = size >= ZIP64_FROM_BYTES
    extra = (struct.pack("<HHQQ", 1, 16, size, size) if wide else b"") + extra
    version, field = (_ZIP64_VERSION, MAX32) if wide else (_VERSION, size if says_size else 0)
    flags = _HAS_DESCRIPTOR if crc is None else 0
    fields = (_MAGIC, version, flags, 0, 0, _DATE, crc or 0, field, field, len(name), len(extra))
    return LOCAL.pack(*fields) + name + extra


def descriptor(size: int, crc: int) -> bytes:
    """Return CRC and sizes, for after a record."""
    return struct.pack("<4sI" + ("QQ" if size >= ZIP64_FROM_BYTES else "II"), b"PK\x07\x08", crc, size, size)


def central_header(name: bytes, size: int, crc: int, start: int, *, described: bool = True) -> bytes:
    """Return a record's directory entry."""
    wide_size, wide_start = size >= ZIP64_FROM_BYTES, start >= ZIP64_FROM_BYTES
    numbers = ([size, size] if wide_size else []) + ([start] if wide_start else [])
    extra = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    version = _ZIP64_VERSION if numbers else _VERSION
    field, at = MAX32 if wide_size else size, MAX32 if wide_start else start
    flags = _HAS_DESCRIPTOR if described else 0
    fields = (b"PK\x01\x02", version, version, flags, 0, 0, _DATE, crc, field, field, len(name), len(extra))
    return CENTRAL.pack(*fields, 0, 0, 0, 0, at) + name + extra


def directory_end(start: int, size: int, count: int) -> bytes:
    """Return the end-of-directory record."""
    few = min(count, MAX16)
    return END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, MAX32), min(start, MAX32), 0)


def zip64_directory_end(start: int, size: int, count: int) -> bytes:
    """Return the zip64 record of `directory_end`."""
    version = _ZIP64_VERSION
    return ZIP64_END.pack(b"PK\x06\x06", 44, version, version, 0, 0, count, count, size, start) + ZIP64_LOCATOR.pack(
        b"PK\x06\x07", 0, start + size, 1
    )


ALIGNMENT_BYTES = 64
# Small records are collected up to this size before they are passed to the storage.
_PACK_BYTES = 1 << 20


class ZipFileWriter:
    """Writer of a zip archive to a new `Sink`, which the caller closes after `finish`.

    Record names get the prefix `archive/`, which `torch.load` requires.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._position = 0
        self._directory = bytearray()
        self._count = 0
        self._pending: list[Buffer] = []
        self._pending_bytes = 0

    def add(self, name: str, size: int, pieces: Iterable[Buffer]) -> int:
        """Append a record with data at a multiple of 64 bytes; returns the CRC32 of the data.

        Each piece is written before the next one is requested. Raises ValueError if the pieces do not add up to `size`.
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
        """Write the directory, and flush the sink."""
        start, size = self._position, len(self._directory)
        self._put(bytes(self._directory))
        self._put(zip64_directory_end(start, size, self._count) + directory_end(start, size, self._count))
        self._flush()

    def _local(self, name: bytes, size: int) -> bytes:
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


_ARCHIVE = b"a"
_PAYLOAD_NAME = _ARCHIVE + b"/data/0"


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes that make a tensor's raw bytes a `torch.save` archive."""

    prefix: bytes
    payload_bytes: int
    before_crc: bytes
    between_crcs: bytes
    after_crc: bytes

    def suffix(self, crc32: int) -> bytes:
        """Return the bytes after a tensor with this CRC32."""
        crc = crc32.to_bytes(4, "little")
        return b"".join((self.before_crc, crc, self.between_crcs, crc, self.after_crc))


@functools.lru_cache(maxsize=4096)
def tensor_frame(dtype: str, sizes: tuple[int, ...], item_bytes: int | None = None) -> Frame:
    """Return a contiguous tensor's frame: `prefix + payload + suffix(crc32(payload))` opens with `torch.load`.

    Raises ValueError for an unknown or quantized dtype.
    """
    item_bytes = ITEM_BYTES.get(dtype, item_bytes)
    if item_bytes is None or not dtype.isidentifier() or dtype.startswith(("qint", "quint")):
        raise ValueError(f"a tensor of dtype {dtype!r} cannot be framed; store it as a torch.save archive")
    if min(sizes, default=0) < 0:
        raise ValueError(f"sizes {sizes} of a tensor cannot be negative")
    payload_bytes = math.prod(sizes) * item_bytes
    prefix = bytearray()
    directory = bytearray()
    for name, data in ((b"/data.pkl", _pickle(dtype, sizes, item_bytes)), (b"/version", b"3\n")):
        crc = crc32(data)
        directory += central_header(_ARCHIVE + name, len(data), crc, len(prefix), described=False)
        prefix += local_header(_ARCHIVE + name, len(data), crc=crc) + data
    start = len(prefix)
    prefix += local_header(_PAYLOAD_NAME, payload_bytes, says_size=False)
    behind = descriptor(payload_bytes, 0)
    directory_start = len(prefix) + payload_bytes + len(behind)
    cut = len(directory) + 16  # the CRC's place in the last entry
    directory += central_header(_PAYLOAD_NAME, payload_bytes, 0, start)
    end = directory_end(directory_start, len(directory), 3)
    if payload_bytes >= ZIP64_FROM_BYTES:
        wide = zip64_directory_end(directory_start, len(directory), 3)
        end = wide + directory_end(MAX32, len(directory), 3)
    return Frame(
        bytes(prefix),
        payload_bytes,
        behind[:4],
        behind[8:] + bytes(directory[:cut]),
        bytes(directory[cut + 4 :]) + end,
    )


def _pickle(dtype: str, sizes: Sequence[int], item_bytes: int) -> bytes:
    storage = TYPED_STORAGES.get(dtype)
    function, module, count = "_rebuild_tensor_v2", "torch", math.prod(sizes)
    tail = b""
    if storage is None:
        function, module, storage = "_rebuild_tensor_v3", "torch.storage", "UntypedStorage"
        count *= item_bytes
        tail = global_2("torch", dtype)
    place = [text_2("storage"), global_2(module, storage), text_2("0"), text_2("cpu"), integer(count)]
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    numbers = [collected([*map(integer, each)]) for each in (sizes, strides[::-1])]
    arguments = [collected(place) + b"Q", integer(0), *numbers]
    arguments += [b"\x89", global_2("collections", "OrderedDict") + b")R", tail]
    return b"\x80\x02" + global_2("torch._utils", function) + b"(" + b"".join(arguments) + b"tR."

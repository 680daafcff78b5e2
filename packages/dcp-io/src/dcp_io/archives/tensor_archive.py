"""The archive that makes bare tensor bytes a file which `torch.load` opens, emitted around them without torch.

`tensor_frame` gives what goes before and after the bytes. Only the records that readers need are written, in the
order `data.pkl`, `version`, `data/0`, all stored. Archives of other writers are read and checked in
`archive_checks`.

Source: torch 2.13 `torch.serialization._save` and `torch._utils._rebuild_tensor_v2`/`_v3` (what the pickle calls).
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_io.archives.crc import crc32
from dcp_manifest.index.dtypes import ITEM_BYTES, TYPED_STORAGES

__all__ = ["Frame", "tensor_frame"]

_ARCHIVE = b"a"
_PAYLOAD_NAME = _ARCHIVE + b"/data/0"
_DATE = 0x0021  # 1 January 1980, the earliest that the format can express
_HAS_DESCRIPTOR = 0x0008
_VERSION = 20
_ZIP64_VERSION = 45
_MAX32 = 0xFFFFFFFF
# From this payload size on, sizes or the directory's position may need 64 bits.
ZIP64_FROM_BYTES = _MAX32 - 4096
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_ZIP64_EXTRA = struct.Struct("<HHQQ")
_ZIP64_END = struct.Struct("<4sQHHIIQQQQ")
_ZIP64_LOCATOR = struct.Struct("<4sIQI")


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds the bytes of one tensor so that they form an archive."""

    prefix: bytes
    payload_bytes: int
    before_crc: bytes
    between_crcs: bytes
    after_crc: bytes

    def suffix(self, crc32: int) -> bytes:
        """What follows the payload, given the payload's CRC32."""
        crc = crc32.to_bytes(4, "little")
        return b"".join((self.before_crc, crc, self.between_crcs, crc, self.after_crc))

    @property
    def suffix_bytes(self) -> int:
        """Length of every suffix."""
        return len(self.before_crc) + len(self.between_crcs) + len(self.after_crc) + 8


@functools.lru_cache(maxsize=4096)
def tensor_frame(dtype: str, sizes: tuple[int, ...], item_bytes: int | None = None) -> Frame:
    """The frame of a contiguous tensor; `prefix + payload + suffix(crc32(payload))` opens with `torch.load`.

    Args:
        dtype: Name of the torch dtype without `torch.`; not a quantized one, whose values need their quantizer.
        sizes: Of the tensor; `()` for a 0-dimensional one.
        item_bytes: Bytes per element; needed only for a dtype that is newer than this package.

    Returns:
        The frame; `payload_bytes` is the length that the payload must have (row-major, little-endian elements).

    Raises:
        ValueError: The dtype is unknown or quantized, or a size is negative.
    """
    item_bytes = ITEM_BYTES.get(dtype, item_bytes)
    if item_bytes is None or not dtype.isidentifier() or dtype.startswith(("qint", "quint")):
        raise ValueError(f"a tensor of dtype {dtype!r} cannot be framed; store it as a torch.save archive")
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes {sizes} of a tensor cannot be negative")
    payload_bytes = math.prod(sizes) * item_bytes
    wide = payload_bytes >= ZIP64_FROM_BYTES
    prefix = bytearray()
    directory = bytearray()
    for name, data in ((b"/data.pkl", _pickle(dtype, sizes, item_bytes)), (b"/version", b"3\n")):
        header = _local(_ARCHIVE + name, crc=crc32(data), size=len(data))
        directory += _central(_ARCHIVE + name, crc=crc32(data), size=len(data), start=len(prefix))
        prefix += header + data
    start = len(prefix)
    prefix += _local_payload(payload_bytes, wide=wide)
    before_crc = b"PK\x07\x08"
    sizes_field = struct.pack("<QQ" if wide else "<II", payload_bytes, payload_bytes)
    entry = _central_payload(payload_bytes, start=start, wide=wide)
    directory_start = len(prefix) + payload_bytes + len(before_crc) + 4 + len(sizes_field)
    directory += entry
    cut = len(directory) - len(entry) + 16  # the CRC's place in the last entry
    end = _end(directory_start, len(directory), wide=wide)
    return Frame(
        bytes(prefix),
        payload_bytes,
        before_crc,
        sizes_field + bytes(directory[:cut]),
        bytes(directory[cut + 4 :]) + end,
    )


def _local(name: bytes, *, crc: int, size: int) -> bytes:
    return _LOCAL.pack(b"PK\x03\x04", _VERSION, 0, 0, 0, _DATE, crc, size, size, len(name), 0) + name


def _local_payload(size: int, *, wide: bool) -> bytes:
    version, field, extra = _VERSION, 0, b""
    if wide:
        version, field, extra = _ZIP64_VERSION, _MAX32, _ZIP64_EXTRA.pack(1, 16, size, size)
    head = _LOCAL.pack(
        b"PK\x03\x04", version, _HAS_DESCRIPTOR, 0, 0, _DATE, 0, field, field, len(_PAYLOAD_NAME), len(extra)
    )
    return head + _PAYLOAD_NAME + extra


def _central(name: bytes, *, crc: int, size: int, start: int) -> bytes:
    return (
        _CENTRAL.pack(
            b"PK\x01\x02", _VERSION, _VERSION, 0, 0, 0, _DATE, crc, size, size, len(name), 0, 0, 0, 0, 0, start
        )
        + name
    )


def _central_payload(size: int, *, start: int, wide: bool) -> bytes:
    version, field, extra = _VERSION, size, b""
    if wide:
        version, field, extra = _ZIP64_VERSION, _MAX32, _ZIP64_EXTRA.pack(1, 16, size, size)
    name = _PAYLOAD_NAME
    head = _CENTRAL.pack(
        b"PK\x01\x02", version, version, _HAS_DESCRIPTOR, 0, 0, _DATE, 0, field, field,
        len(name), len(extra), 0, 0, 0, 0, start,
    )  # fmt: skip
    return head + name + extra


def _end(start: int, size: int, *, wide: bool) -> bytes:
    if not wide:
        return _END.pack(b"PK\x05\x06", 0, 0, 3, 3, size, start, 0)
    return (
        _ZIP64_END.pack(b"PK\x06\x06", 44, _ZIP64_VERSION, _ZIP64_VERSION, 0, 0, 3, 3, size, start)
        + _ZIP64_LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
        + _END.pack(b"PK\x05\x06", 0, 0, 3, 3, size, _MAX32, 0)
    )


def _pickle(dtype: str, sizes: Sequence[int], item_bytes: int) -> bytes:
    """`data.pkl`: a call that rebuilds the tensor from the record `data/0`, as protocol-2 opcodes."""
    storage = TYPED_STORAGES.get(dtype)
    function, module, count = "_rebuild_tensor_v2", "torch", math.prod(sizes)
    tail = b""
    if storage is None:
        function, module, storage = "_rebuild_tensor_v3", "torch.storage", "UntypedStorage"
        count *= item_bytes
        tail = _global("torch", dtype)
    place = b"(" + _text("storage") + _global(module, storage) + _text("0") + _text("cpu") + _int(count) + b"tQ"
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    arguments = place + _int(0) + _tuple(sizes) + _tuple(strides[::-1])
    arguments += b"\x89" + _global("collections", "OrderedDict") + b")R" + tail
    return b"\x80\x02" + _global("torch._utils", function) + b"(" + arguments + b"tR."


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode("ascii")


def _text(value: str) -> bytes:
    data = value.encode("ascii")
    return b"X" + struct.pack("<I", len(data)) + data


def _int(value: int) -> bytes:
    if value < 1 << 8:
        return b"K" + struct.pack("<B", value)
    if value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + struct.pack("<B", len(data)) + data


def _tuple(values: Sequence[int]) -> bytes:
    data = b"".join(map(_int, values))
    if len(values) <= 3:
        return data + (b")", b"\x85", b"\x86", b"\x87")[len(values)]
    return b"(" + data + b"t"

"""CRC checks of bytes that were read.

Source: Linux `madvise(2)`, `mincore(2)`.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcp_base.descriptors import kernel_call
from dcp_io.archives.archive_checks import verify_zip
from dcp_io.archives.crc import combine, crc32, crc_at
from dcp_io.archives.zip_format import is_zip
from dcp_io.reading.open_files import OpenFile
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.index.columns import Framing, StoredItem, block_bytes
from dcp_manifest.types import I64

# A piece of this size is still in the processor's L1 cache when it is read a second time.
_COPY_BYTES = 256 << 10
_LEAST_BYTES = 1 << 20
_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, of Linux 5.14."""


def make_pages(buffer: memoryview) -> None:
    """Create a large buffer's pages, faster than by faults."""
    if len(buffer) < _LEAST_BYTES:
        return
    mincore = kernel_call("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_ubyte))
    madvise = kernel_call("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if mincore is None or madvise is None:
        return
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + len(buffer)) // mmap.PAGESIZE * mmap.PAGESIZE
    is_there = ctypes.c_ubyte()
    if mincore(start, mmap.PAGESIZE, ctypes.byref(is_there)) == 0 and not is_there.value & 1:
        madvise(start, stop - start, _POPULATE_WRITE)


def read_with_crc(
    file: OpenFile, position: int, buffers: Sequence[memoryview], value: int, *, piece_bytes: int | None
) -> int:
    """Fill the buffers, in pieces if these have a size, and return the CRC32 continued from `value`."""
    for buffer in buffers:
        make_pages(buffer)
    if file.fetch is not None:
        return _copy_with_crc(file.fetch(position, sum(map(len, buffers))), buffers, value)
    if piece_bytes is None:  # each read may be a request
        file.source.read_into(position, buffers)
        for buffer in buffers:
            value = crc32(buffer, value)
        return value
    for buffer in buffers:
        for start in range(0, len(buffer), piece_bytes):
            piece = buffer[start : start + piece_bytes]
            file.source.read_into(position, [piece])
            value = crc32(piece, value)  # while it is in the processor's cache
            position += len(piece)
    return value


def _copy_with_crc(data: memoryview, buffers: Sequence[memoryview], value: int) -> int:
    # Copying arrays lets other threads run, copying memoryviews does not.
    given, start = np.frombuffer(data, np.uint8), 0
    for buffer in buffers:
        taken = np.frombuffer(buffer, np.uint8)
        for first in range(0, len(taken), _COPY_BYTES):
            part = given[start : start + min(_COPY_BYTES, len(taken) - first)]
            value = crc32(part.data, value)
            taken[first : first + len(part)] = part
            start += len(part)
    return value


def check_blocks(
    key: str, item: StoredItem, start: int, stop: int, buffers: Sequence[memoryview], value: int | None = None
) -> None:
    """Check bytes [start, stop) of a stored range, at block borders; `value` is the CRC32 up to `stop`, if known."""
    if value is None:
        value = crc_at(item, start)
        for buffer in buffers:
            value = crc32(buffer, value)
    if value == crc_at(item, stop):
        return
    data = b"".join(buffers)
    block = block_bytes(item.stored_bytes) if item.running_crcs is not None else item.stored_bytes
    bad = start
    for bad in range(start, stop, block):
        end = min(stop, bad + block)
        if crc32(data[bad - start : end - start], crc_at(item, bad)) != crc_at(item, end):
            break
    raise _damage(key, item, bad, min(stop, bad + block))


def check_whole(key: str, item: StoredItem, crcs: Mapping[int, tuple[int, int]]) -> None:
    """Check a stored range by its pieces' CRC32s."""
    value = 0
    for position in sorted(crcs):
        value = combine(value, *crcs[position])
    if value != item.crc32:
        raise _damage(key, item, 0, item.stored_bytes)


def check_archive(key: str, item: StoredItem, data: memoryview) -> bool:
    """Verify an archive by its own CRCs; False without any."""
    verdict = verify_zip(data)
    if verdict is False or (item.framing is Framing.TORCH_ZIP and not is_zip(data)):
        raise CorruptCheckpointError(
            "the stored archive is damaged: its bytes do not match its CRCs; load another checkpoint",
            file=item.file,
            key=key,
            offset=item.offset,
        )
    return verdict is True


def _damage(key: str, item: StoredItem, start: int, stop: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"bytes {start} to {stop} of the stored data differ from what was written: the file is damaged or was swapped; "
        "load another checkpoint",
        file=item.file,
        key=key,
        offset=item.offset + item.lead + start,
    )


Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Demands:
    """Byte ranges that one rank wants, as columns with a row per range: ascending, without overlaps.

    The form is canonical: two ranks that want the same bytes in the same rows have equal columns.

    Attributes:
        names: Files of the checkpoint's folder, ascending; each has at least one row.
        objects: int32[n], position of the row's file in `names`.
        starts: int64[n], first byte.
        stops: int64[n], exclusive end; no row is empty.
        grains: int64[n]; a row may be cut at `start + k * grain`, and not at all if 0.
    """

    names: tuple[str, ...]
    objects: Numbers
    starts: I64
    stops: I64
    grains: I64

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        objects: npt.ArrayLike,
        starts: npt.ArrayLike,
        stops: npt.ArrayLike,
        grains: npt.ArrayLike,
    ) -> Demands:
        """Return the canonical form of rows in any order, in which ranges may be empty or overlap.

        Rows that overlap become one row, which may be cut only if their grains and the positions of these are the same.
        Rows that only touch stay separate.
        """
        order = sorted(range(len(names)), key=names.__getitem__)
        places = np.empty(len(names), np.int64)
        places[order] = np.arange(len(names))
        rows = [np.asarray(column, np.int64).reshape(-1) for column in (objects, starts, stops, grains)]
        wanted = rows[1] != rows[2]
        rows = [column[wanted] for column in (places[rows[0]], *rows[1:])]
        first = np.lexsort((rows[1], rows[0]))
        rows = _merge_overlaps(*(column[first] for column in rows))
        used, objects = np.unique(rows[0], return_inverse=True)
        found = tuple(names[order[place]] for place in used.tolist())
        return cls(found, objects.astype(np.int32), *rows[1:])

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows."""
        return int((self.stops - self.starts).sum())

    def digest(self) -> bytes:
        """Return 16 bytes that, for practical purposes, only equal demands share."""
        made = hashlib.blake2b(digest_size=16)
        for name in self.names:
            encoded = name.encode("utf-8", "surrogateescape")
            made.update(len(encoded).to_bytes(8, "little"))
            made.update(encoded)
        made.update(len(self.objects).to_bytes(8, "little"))
        for column, dtype in ((self.objects, "<i4"), (self.starts, "<i8"), (self.stops, "<i8"), (self.grains, "<i8")):
            made.update(column.astype(dtype).tobytes())
        return made.digest()


def _merge_overlaps(objects: I64, starts: I64, stops: I64, grains: I64) -> list[I64]:
    if len(objects) == 0:
        return [objects, starts, stops, grains]
    # Objects are placed one after another, so that one running maximum serves all of them.
    span = stops.max() + 1
    ends = np.maximum.accumulate(stops + objects * span)
    begins = starts + objects * span
    first = np.flatnonzero(np.concatenate(([True], begins[1:] >= ends[:-1])))
    last = np.append(first[1:], len(objects)) - 1
    group = np.repeat(np.arange(len(first)), last - first + 1)
    grain = grains[first][group]
    off_grid = (grains != grain) | ((starts - starts[first][group]) % np.maximum(grain, 1) != 0)
    off_grid[first] = False
    cut = grains[first].copy()
    cut[group[off_grid]] = 0
    return [objects[first], starts[first], (ends - objects * span)[last], cut]

"""CRC checks of bytes that were read; errors name file, key and offset of the damage.

Also `make_pages`, for the destinations before they are filled.

Source: Linux `madvise(2)`, `mincore(2)`.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence

import numpy as np

from dcp_io.archives.archive_checks import is_zip, verify_zip
from dcp_io.archives.crc import combine, crc32, crc_at
from dcp_io.stores.store import Source
from dcp_manifest.descriptors import kernel_call
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.index.items import Framing, StoredItem, block_bytes

__all__ = ["check_archive", "check_blocks", "check_whole", "make_pages", "read_with_crc"]

# A piece of this size is still in the processor's L1 cache when it is read a second time.
_COPY_BYTES = 256 << 10
_LEAST_BYTES = 1 << 20
_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, of Linux 5.14."""


def make_pages(buffer: memoryview) -> None:
    """Make the pages of a large writable buffer that is about to be overwritten, if its first one is missing.

    A process that has just started loads into memory that nothing has touched. Without this, the kernel makes each page
    in a fault of its own, and these take longer than the copy. The contents do not change. Does nothing where the
    system cannot do it.
    """
    if len(buffer) < _LEAST_BYTES:
        return
    mincore = kernel_call("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_ubyte))
    madvise = kernel_call("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if mincore is None or madvise is None:
        return
    address: int = np.frombuffer(buffer, np.uint8).ctypes.data
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + len(buffer)) // mmap.PAGESIZE * mmap.PAGESIZE
    is_there = ctypes.c_ubyte()
    if mincore(start, mmap.PAGESIZE, ctypes.byref(is_there)) == 0 and not is_there.value & 1:
        madvise(start, stop - start, _POPULATE_WRITE)


def read_with_crc(source: Source, position: int, buffers: Sequence[memoryview], value: int) -> int:
    """Fill the buffers from a file, and return the CRC32 `value` continued over the bytes that were read.

    Args:
        source: The file.
        position: Offset in the file, bytes.
        buffers: Destinations, filled one after another.
        value: CRC32 of the bytes of the item before `position`; 0 for the CRC32 of the read bytes alone.
    """
    for buffer in buffers:
        make_pages(buffer)
    if source.brings_memory:
        return _copy_with_crc(source.fetch(position, sum(map(len, buffers))), buffers, value)
    source.read_into(position, buffers)
    for buffer in buffers:
        value = crc32(buffer, value)
    return value


def _copy_with_crc(data: memoryview, buffers: Sequence[memoryview], value: int) -> int:
    """Fill the buffers with `data`, and continue a CRC32 over it."""
    # Copies of arrays let other threads run, those of memoryviews do not.
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
    """Check bytes [start, stop) of a stored range against the CRCs recorded at its block borders.

    Args:
        key: FQN of the item, for error messages.
        item: The item that was read.
        start: First position in the stored range; a CRC must be recorded there.
        stop: End position in the stored range; a CRC must be recorded there.
        buffers: The bytes that were read.
        value: CRC32 of the stored range up to `stop`, if already computed; None computes it.

    Raises:
        CorruptCheckpointError: A CRC does not match; the message names the first bad block.
    """
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
    """Check a whole stored range against the item's single CRC, given the CRC32s of the pieces that were read.

    Args:
        key: FQN of the item, for error messages.
        item: The item that was read.
        crcs: Position of each piece in the stored range → CRC32 and length (bytes) of the piece.

    Raises:
        CorruptCheckpointError: The CRC does not match.
    """
    value = 0
    for position in sorted(crcs):
        value = combine(value, *crcs[position])
    if value != item.crc32:
        raise _damage(key, item, 0, item.stored_bytes)


def check_archive(key: str, item: StoredItem, data: memoryview) -> bool:
    """Verify an archive by the CRCs inside it; returns False if the archive contains no CRCs.

    Args:
        key: FQN of the item, for error messages.
        item: The item that was read.
        data: The whole archive.

    Raises:
        CorruptCheckpointError: A CRC does not match, or a tensor's bytes are not an archive.
    """
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

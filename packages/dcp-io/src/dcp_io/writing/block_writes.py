"""Payloads that are encoded block by block on their way into a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from dcp_io.archives.crc import combine, crc32
from dcp_io.requests import BlockEncoder, PiecewiseData
from dcp_io.stores.store import Buffer
from dcp_manifest.index.items import EncodedBlocks

__all__ = ["write_blocks"]


def write_blocks(
    data: Buffer | PiecewiseData, encoder: BlockEncoder, max_bytes: int, write: Callable[[Buffer], None]
) -> tuple[EncodedBlocks, int]:
    """Encode a payload and write each block as soon as it is there.

    Args:
        data: The payload.
        encoder: What its blocks go through.
        max_bytes: Memory that pieces of the payload may take.
        write: Takes the next encoded bytes; they may change afterwards.

    Returns:
        What is to be known of the blocks, and the CRC32 of all that was written.

    Raises:
        BaseException: Whatever the encoder raised.
    """
    lengths, crcs, value = [], [], 0
    for block in _blocks(data, encoder.block_bytes, max_bytes):
        encoded = encoder.encode(block)
        crc = crc32(encoded)
        value = combine(value, crc, len(encoded))
        lengths.append(len(encoded))
        crcs.append(crc)
        write(encoded)
    return EncodedBlocks(encoder.block_bytes, np.array(lengths, np.uint32), np.array(crcs, np.uint32)), value


def _blocks(data: Buffer | PiecewiseData, block_bytes: int, max_bytes: int) -> Iterator[memoryview]:
    """The payload in blocks; each stays as it is until the next one is asked for."""
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data)
        for start in range(0, len(view), block_bytes):
            yield view[start : start + block_bytes]
        return
    block = memoryview(bytearray(min(block_bytes, data.nbytes)))
    filled = 0
    for piece in data.pieces(max_bytes):
        start = 0
        while start < len(piece):
            part = piece[start : start + block_bytes - filled]
            block[filled : filled + len(part)] = part
            start += len(part)
            filled += len(part)
            if filled == block_bytes:
                yield block
                filled = 0
    if filled:
        yield block[:filled]

"""Encoding of payloads block by block while they are written to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from dcp_io.archives.crc import combine, crc32
from dcp_io.requests import BlockEncoder, PiecewiseData
from dcp_io.stores.store import Buffer
from dcp_manifest.index.items import EncodedBlocks

__all__ = ["write_blocks"]


def write_blocks(
    data: Buffer | PiecewiseData,
    encoder: BlockEncoder,
    max_bytes: int,
    write: Callable[[Buffer], None],
    count: Callable[[int], object] = lambda _: None,
) -> tuple[EncodedBlocks, int]:
    """Encode a payload, and write each block as soon as it is encoded.

    Args:
        data: Bytes of the payload.
        encoder: Encoder of the payload's blocks.
        max_bytes: Limit of the memory for pieces of the payload.
        write: Callback that writes the next encoded bytes, whose memory is reused after the call.
        count: Callback for progress, which gets the size of each block before encoding, once it is written.

    Returns:
        Lengths and CRCs of the encoded blocks, and the CRC32 of all bytes that were written.

    Raises:
        BaseException: Any error of the encoder.
    """
    lengths, crcs, value = [], [], 0
    for block in _blocks(data, encoder.block_bytes, max_bytes):
        encoded = encoder.encode(block)
        crc = crc32(encoded)
        value = combine(value, crc, len(encoded))
        lengths.append(len(encoded))
        crcs.append(crc)
        write(encoded)
        count(len(block))
    return EncodedBlocks(encoder.block_bytes, np.array(lengths, np.uint32), np.array(crcs, np.uint32)), value


def _blocks(data: Buffer | PiecewiseData, block_bytes: int, max_bytes: int) -> Iterator[memoryview]:
    """Yield the payload in blocks; each is valid until the next one is requested."""
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

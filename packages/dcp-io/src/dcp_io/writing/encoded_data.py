"""Encoded payloads: block by block, or through a chain of transforms."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, cast

import numpy as np

from dcp_io.archives.crc import combine, crc32
from dcp_io.archives.zip_format import Frame
from dcp_io.requests import BlockEncoder, PiecewiseData, StreamEncoder
from dcp_manifest.index.columns import EncodedBlocks
from dcp_manifest.types import Buffer


def write_blocks(
    data: Buffer | PiecewiseData,
    encoder: BlockEncoder,
    max_bytes: int,
    write: Callable[[Buffer], None],
    count: Callable[[int], object] = lambda _: None,
) -> tuple[EncodedBlocks, int]:
    """Encode a payload, and write each block as soon as it is encoded.

    `write` gets memory that is reused after the call, `count` sizes before encoding.
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
    """Each block is valid until the next one."""
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


_STEP_BYTES = 1 << 20


class EncodedData(io.RawIOBase):
    """Buffer of encoded bytes, in a temporary file above a size limit."""

    def __init__(self, max_bytes: int) -> None:
        self._kept = tempfile.SpooledTemporaryFile(max_size=max_bytes)  # noqa: SIM115 - closed by `free`
        self.nbytes = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Buffer) -> int:  # type: ignore[override]
        """Append bytes; returns their number."""
        if self._kept.closed:  # an encoder dropped after an error may still write when it is garbage-collected
            return memoryview(data).nbytes
        count = self._kept.write(data)
        self.nbytes += count
        return count

    def close(self) -> None:
        """Do nothing: encoders close their output too early."""

    def free(self) -> None:
        """Release memory or file."""
        self._kept.close()

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes like `PiecewiseData.pieces`, once only."""
        self._kept.seek(0)
        step = min(_STEP_BYTES, max(1, max_bytes))
        while data := self._kept.read(step):
            yield memoryview(data)
        self.free()


def encode_payload(
    data: Buffer | PiecewiseData,
    frame: Frame | None,
    encoders: Iterable[StreamEncoder],
    max_bytes: int,
    count: Callable[[int], object] = lambda _: None,
) -> EncodedData:
    """Encode a payload, with an archive frame or none, through a chain of transforms, of which the last encodes first.

    The result may take `max_bytes` of memory, in addition to the pieces.
    """
    result = EncodedData(max_bytes)
    streams = [cast("IO[bytes]", result)]
    try:
        for encoder in encoders:
            streams.append(encoder.transform_to(streams[-1]))
        value = 0
        if frame is not None:
            streams[-1].write(frame.prefix)
        for piece in _pieces(data, max_bytes):
            value = crc32(piece, value)
            streams[-1].write(piece)
            count(len(piece))
        if frame is not None:
            streams[-1].write(frame.suffix(value))
        for stream in reversed(streams):  # closing one flushes its rest into the one before it
            stream.close()
    except BaseException:
        result.free()
        raise
    return result


def _pieces(data: Buffer | PiecewiseData, max_bytes: int) -> Iterator[Buffer]:
    if not isinstance(data, bytes | bytearray | memoryview):
        yield from data.pieces(max_bytes)
        return
    view = memoryview(data)
    for start in range(0, len(view), _STEP_BYTES):
        yield view[start : start + _STEP_BYTES]

"""Stream encoding of payloads on their way into a file.

How long the result is shows only at its end, so it is kept until then: in memory up to a limit, then in a file that
no other process sees.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, cast

from dcp_io.archives.crc import crc32
from dcp_io.archives.tensor_archive import Frame
from dcp_io.requests import PiecewiseData, StreamEncoder
from dcp_io.stores.store import Buffer

__all__ = ["EncodedData", "encode_payload"]

_STEP_BYTES = 1 << 20


class EncodedData(io.RawIOBase):
    """Buffer of encoded bytes, to be read in pieces; spills to a file above a limit.

    Args:
        max_bytes: More than so many bytes are kept in a temporary file instead of in memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._kept = tempfile.SpooledTemporaryFile(max_size=max_bytes)  # noqa: SIM115 - closed by `free`
        self.nbytes = 0
        """Number of bytes in it."""

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Buffer) -> int:  # type: ignore[override]
        """Append bytes."""
        if self._kept.closed:  # an encoder that was dropped after an error ends its stream when it is collected
            return memoryview(data).nbytes
        count = self._kept.write(data)
        self.nbytes += count
        return count

    def close(self) -> None:
        """Do nothing: encoders close their output, but the bytes are needed afterwards. See `free`."""

    def free(self) -> None:
        """Drop the bytes."""
        self._kept.close()

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """See `PiecewiseData`; once."""
        self._kept.seek(0)
        step = min(_STEP_BYTES, max(1, max_bytes))
        while data := self._kept.read(step):
            yield memoryview(data)
        self.free()


def encode_payload(
    data: Buffer | PiecewiseData, frame: Frame | None, encoders: Iterable[StreamEncoder], max_bytes: int
) -> EncodedData:
    """Encode a payload, and return the result in a buffer.

    Args:
        data: Its bytes.
        frame: What to put around them first, so that they form an archive.
        encoders: The first of them writes the result, the last takes the payload.
        max_bytes: Memory that the pieces and the result may take, each.

    Raises:
        BaseException: An encoder's error.
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
        if frame is not None:
            streams[-1].write(frame.suffix(value))
        for stream in reversed(streams):  # each writes what it still has into the one before
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

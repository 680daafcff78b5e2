"""Encoding of whole payloads as streams while they are written to a file.

The encoded size is known only at the end, so the result is buffered: in memory up to a limit, above it in an anonymous
temporary file.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, cast

from dcp_io.archives.crc import crc32
from dcp_io.archives.tensor_archive import Frame
from dcp_io.requests import PiecewiseData, StreamEncoder
from dcp_io.stores.store import Buffer

__all__ = ["EncodedData", "encode_payload"]

_STEP_BYTES = 1 << 20


class EncodedData(io.RawIOBase):
    """Buffer of encoded bytes that can be read in pieces; above a size limit the bytes are moved to a temporary file.

    Args:
        max_bytes: Size above which the bytes are moved to a temporary file.
    """

    def __init__(self, max_bytes: int) -> None:
        self._kept = tempfile.SpooledTemporaryFile(max_size=max_bytes)  # noqa: SIM115 - closed by `free`
        self.nbytes = 0
        """Number of bytes in the buffer."""

    def writable(self) -> bool:
        """Return True: the buffer accepts writes."""
        return True

    def write(self, data: Buffer) -> int:  # type: ignore[override]
        """Append bytes to the buffer; returns their number."""
        if self._kept.closed:  # an encoder dropped after an error may still write when it is garbage-collected
            return memoryview(data).nbytes
        count = self._kept.write(data)
        self.nbytes += count
        return count

    def close(self) -> None:
        """Do nothing: encoders close their output, but the bytes are still needed. `free` releases the buffer."""

    def free(self) -> None:
        """Release the memory or the temporary file of the buffer."""
        self._kept.close()

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes like `PiecewiseData.pieces`. Can be called only once."""
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
    """Encode a payload through a chain of transforms, and return the result in a buffer.

    Args:
        data: Bytes of the payload.
        frame: Archive framing to put around the bytes before encoding.
        encoders: Transforms in decoding order: the last one encodes first.
        max_bytes: Limit of the memory for the pieces; the result may take the same amount again.
        count: Callback for progress, which gets the size of each piece, once it is encoded.

    Raises:
        BaseException: Any error of an encoder.
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

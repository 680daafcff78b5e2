"""One data file while it is written: framing, alignment and packing of items, and their CRCs on the way."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from dcp_io.crc import RunningCrc, crc32
from dcp_io.store import Buffer, Sink
from dcp_io.zip_payload import tensor_frame
from dcp_manifest.dtypes import ITEM_BYTES
from dcp_manifest.items import CRC_BLOCK_MIN_BYTES, Framing, StoredItem
from dcp_manifest.requests import Payload

__all__ = ["ALIGNMENT_BYTES", "DataFile", "alignment"]

ALIGNMENT_BYTES = 64
# Pieces are collected up to this size before they are handed to the storage.
PACK_BYTES = 1 << 20
# Of a large payload, so much is checksummed and then written while it is still in the processor's cache.
STEP_BYTES = 4 << 20
_ZEROS: Final = bytes(ALIGNMENT_BYTES)
_NO_BORDERS: Final[npt.NDArray[np.uint32]] = np.zeros(0, np.uint32)
_NO_BORDERS.flags.writeable = False


class DataFile:
    """Appends items to a sink, each at the place its alignment asks for.

    Payloads begin at a multiple of 64 bytes in the file (small raw ones: of their element size); the gaps are zero.

    Args:
        sink: A new object; this takes over closing it.
        layout: `torch` frames RAW payloads as archives, `raw` does not.
    """

    def __init__(self, sink: Sink, *, layout: str) -> None:
        self._sink = sink
        self._framed = layout == "torch"
        self._pieces: list[Buffer] = []
        self._pending_bytes = 0

    def add(self, key: str, payload: Payload) -> StoredItem:
        """Append one item; its bytes may be handed to the storage later, at the latest by `close`.

        Args:
            key: FQN, for messages.
            payload: Its memory must stay unchanged until `close`.

        Raises:
            ValueError: The payload's length contradicts its dtype and sizes.
            OSError: The storage refused.
        """
        data = _flat(key, payload)
        size = len(data)
        prefix = suffix = b""
        frame, item_bytes = None, 1
        if payload.framing is Framing.RAW:
            item_bytes = _item_bytes(key, payload, size)
            if self._framed:
                frame = tensor_frame(payload.dtype or "", payload.sizes, item_bytes)
                prefix = frame.prefix
        position = self._sink.tell() + self._pending_bytes
        gap = -(position + len(prefix)) % alignment(payload.framing, size, item_bytes, framed=self._framed)
        self._collect(_ZEROS[:gap])
        self._collect(prefix)
        if size <= CRC_BLOCK_MIN_BYTES:
            value, borders = crc32(data), _NO_BORDERS
            self._collect(data)
        else:
            value, borders = self._stream(data)
        if frame is not None:
            suffix = frame.suffix(value)
            self._collect(suffix)
        if self._pending_bytes >= PACK_BYTES:
            self._flush()
        return StoredItem(
            file=self._sink.name,
            offset=position + gap,
            length=len(prefix) + size + len(suffix),
            lead=len(prefix),
            stored_bytes=size,
            framing=payload.framing,
            crc32=value,
            running_crcs=borders,
        )

    def close(self, *, sync: bool) -> None:
        """Hand over what is pending and complete the file."""
        self._flush()
        self._sink.close(sync=sync)

    def abort(self) -> None:
        """Remove the file."""
        self._pieces.clear()
        self._sink.abort()

    def _collect(self, piece: Buffer) -> None:
        if piece:
            self._pieces.append(piece)
            self._pending_bytes += len(piece)

    def _stream(self, data: Buffer) -> tuple[int, npt.NDArray[np.uint32]]:
        """Write a large payload from its own memory; its CRC32 and running CRCs."""
        running = RunningCrc(len(data))
        view = memoryview(data)
        for start in range(0, len(view), STEP_BYTES):
            part = view[start : start + STEP_BYTES]
            running.update(part)
            self._flush(part)
        return running.value, running.borders()

    def _flush(self, *more: Buffer) -> None:
        if self._pieces or more:
            pieces = [b"".join(self._pieces)] if self._pieces else []
            self._pieces.clear()
            self._pending_bytes = 0
            self._sink.write([*pieces, *more])


def alignment(framing: Framing, size: int, item_bytes: int, *, framed: bool) -> int:
    """Of what a payload's position in its file must be a multiple, given its length and that of its elements."""
    if framing is Framing.OBJECT or (size == 0 and not framed):
        return 1
    if framing is Framing.RAW and not framed and size < ALIGNMENT_BYTES:
        return item_bytes & -item_bytes  # its largest power of two: packed dtypes of the future may not be one
    return ALIGNMENT_BYTES


def _flat(key: str, payload: Payload) -> Buffer:
    data = payload.data
    if isinstance(data, memoryview) and (data.ndim != 1 or data.itemsize != 1 or not data.c_contiguous):
        raise ValueError(f"the payload of {key!r} must be one-dimensional contiguous bytes, not {data.format!r} data")
    return data


def _item_bytes(key: str, payload: Payload, size: int) -> int:
    """Bytes per element; of a dtype that is newer than this package they follow from the payload's length."""
    count = math.prod(payload.sizes)
    if not payload.dtype:
        raise ValueError(f"the payload of {key!r} is raw but names no dtype")
    item_bytes = ITEM_BYTES.get(payload.dtype, size // count if count else 1)
    if size != count * item_bytes:
        raise ValueError(
            f"the payload of {key!r} has {size} bytes; {payload.dtype} of sizes {payload.sizes} takes "
            f"{count * item_bytes}"
        )
    return item_bytes

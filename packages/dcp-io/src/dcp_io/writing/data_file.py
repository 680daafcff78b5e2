"""Writer of one data file: framing, alignment, packing and CRCs of its items."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from dcp_io.archives.crc import RunningCrc, crc32
from dcp_io.archives.tensor_archive import Frame, tensor_frame
from dcp_io.requests import Alike, BlockEncoder, Payload, PiecewiseData, RateGauge
from dcp_io.saves.own_files import MARK_BYTES, data_mark
from dcp_io.stores.store import Buffer, Sink
from dcp_io.writing.block_writes import write_blocks
from dcp_io.writing.stream_writes import encode_payload
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.items import CRC_BLOCK_MIN_BYTES, EncodedBlocks, Framing

__all__ = ["ALIGNMENT_BYTES", "DataFile", "Place", "alignment"]

ALIGNMENT_BYTES = 64
# Small pieces are collected up to this size before they are passed to the storage.
PACK_BYTES = 1 << 20
# A large payload is checksummed and written in steps of this size, which fit into the processor's cache.
STEP_BYTES = 4 << 20
# Write-back is started each time after this many bytes. Measured: with less, the disk waits for calls; with much more,
# too much is left to the final fsync.
SYNC_STEP_BYTES = 32 << 20
_ZEROS: Final = bytes(ALIGNMENT_BYTES)
_RAW = int(Framing.RAW)
_IN_MEMORY = (bytes, bytearray, memoryview)


Place = tuple[int, int, int, int, int, int, int]
"""Location of an item: offset, length, lead, stored_bytes, framing and crc32 of a `StoredItem`, and the number of its
chain of transforms.

It is a plain tuple of numbers, since the garbage collector does not track such tuples: for many small objects, garbage
collection would be the largest cost.
"""


class DataFile:
    """Writer of one data file: appends items to a `Sink`, each at an aligned position.

    The file begins with the mark of its save. Payloads are aligned to 64 bytes in the file (small raw ones to their
    element size); the gaps are zero.

    Args:
        sink: A new object; `close` or `abort` of this file ends it.
        save_id: Id of the save.
        layout: `torch` puts an archive frame around raw tensor chunks, `raw` does not.
        sync: Whether `close` makes the file durable.
        max_piece_bytes: Limit of the memory for pieces of a payload.
        count: Callback for progress, which gets a number of payload bytes, before any encoding, that were just handled.
        gauge: Observer that wants to know how fast the storage takes the first bytes; None for none.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        save_id: str,
        layout: str,
        sync: bool,
        max_piece_bytes: int,
        count: Callable[[int], object] = lambda _: None,
        gauge: RateGauge | None = None,
    ) -> None:
        self._sink = sink
        self._count = count
        self._uncounted = 0
        self._framed = layout == "torch"
        self._sync = sync
        self._max_piece_bytes = max_piece_bytes
        self._gauge, self._measured, self._begun = gauge, False, time.perf_counter()
        self._pieces: list[Buffer] = [data_mark(save_id)]
        self._position = MARK_BYTES
        self._written = 0
        self._sync_started = 0
        self.running_crcs: list[npt.NDArray[np.uint32]] = []
        """Running CRCs of the items that have any, in the order of `add`."""
        self.blocks: dict[int, EncodedBlocks] = {}
        """Encoded blocks of the items that have any, by offset of the item."""
        self.chains: dict[tuple[str, ...], int] = {(): 0}
        """Chain of transform descriptors → its number in `Place`."""
        self._forms: dict[tuple[str | None, tuple[int, ...], int], tuple[Frame | None, int, int]] = {}

    def add(self, key: str, payload: Payload) -> Place:
        """Append one item. Its bytes may be buffered until `close`.

        Args:
            key: FQN of the item, for error messages.
            payload: The bytes of the item; their memory must not change until `close`.

        Returns:
            Offset of the item in the file, `length`, `lead`, `stored_bytes`, `framing` and `crc32` as in `StoredItem`,
            and the number of its chain of transforms in the attribute `chains`.

        Raises:
            ValueError: The payload's length contradicts its dtype and sizes.
            OSError: The write to the storage failed.
        """
        chain = 0
        if payload.blocks is not None and _size_of(key, payload.data):
            return self._add_blocks(key, payload, payload.blocks)
        if payload.encoders:
            payload, chain = self._encoded(key, payload)
        data, framing = payload.data, payload.framing
        size = len(data) if type(data) is bytes else _size_of(key, data)
        if framing == _RAW and not chain:
            known = self._forms.get((payload.dtype, payload.sizes, size))
            frame, lead, aligned = known if known is not None else self._form(key, payload, size)
        else:
            frame, lead, aligned = None, 0, alignment(framing, size, 1, framed=self._framed)
        gap = -(self._position + lead) % aligned
        if gap:
            self._pieces.append(_ZEROS[:gap])
        offset = self._position + gap
        if frame is not None:
            self._pieces.append(frame.prefix)
        self._position = offset + lead
        if size > CRC_BLOCK_MIN_BYTES:
            value = self._stream(data, size, counted=not chain)
        else:
            small = data if isinstance(data, _IN_MEMORY) else _joined(data, self._max_piece_bytes)
            value = crc32(small)
            self._pieces.append(small)
            self._position += size
            self._uncounted += 0 if chain else size  # encoding has counted what it took
        if frame is not None:
            self._end_frame(frame, value)
        if self._position - self._written >= PACK_BYTES:
            self._flush()
        return offset, self._position - offset, lead, size, int(framing), value, chain

    def add_alike(self, key: str, alike: Alike, data: Buffer, count: int) -> list[int]:
        """Append `count` raw payloads of one dtype and size, concatenated in `data`; equivalent to one `add` for each.

        Args:
            key: FQN of one of the items, for error messages.
            alike: Dtype and sizes of the payloads.
            data: The payloads, which are copied.
            count: Number of payloads.

        Returns:
            The seven numbers that `add` returns, for one item after another.
        """
        nbytes = len(data) // count
        frame, lead, aligned = self._form(key, Payload(b"", Framing.RAW, alike.dtype, alike.sizes), nbytes)
        view = memoryview(data)
        self._uncounted += len(view)
        crcs = np.fromiter((crc32(view[n : n + nbytes]) for n in range(0, len(view), nbytes)), "<u4", count)
        prefix, suffix = (frame.prefix, frame.suffix(0)) if frame else (b"", b"")
        length = lead + nbytes + len(suffix)
        step = -(-length // aligned) * aligned
        rows = np.zeros((count, step), np.uint8)
        rows[:, :length] = np.frombuffer(prefix + bytes(nbytes) + suffix, np.uint8)
        rows[:, lead : lead + nbytes] = np.frombuffer(view, np.uint8).reshape(count, nbytes)
        if frame is not None:
            first = lead + nbytes + len(frame.before_crc)
            for place in (first, first + 4 + len(frame.between_crcs)):
                rows[:, place : place + 4] = crcs.view(np.uint8).reshape(count, 4)
        gap = -(self._position + lead) % aligned
        self._pieces += [_ZEROS[:gap], rows.data.cast("B")[: (count - 1) * step + length]]
        offset = self._position + gap
        self._position = offset + (count - 1) * step + length
        if self._position - self._written >= PACK_BYTES:
            self._flush()
        places = np.empty((count, 7), np.int64)
        places[:] = (0, length, lead, nbytes, _RAW, 0, 0)
        places[:, 0] = offset + step * np.arange(count)
        places[:, 5] = crcs
        numbers: list[int] = places.reshape(-1).tolist()
        return numbers

    def _add_blocks(self, key: str, payload: Payload, encoder: BlockEncoder) -> Place:
        """Append a raw payload that is encoded block by block."""
        _item_bytes(key, payload, _size_of(key, payload.data))
        gap = -self._position % ALIGNMENT_BYTES
        if gap:
            self._pieces.append(_ZEROS[:gap])
        offset = self._position = self._position + gap
        blocks, value = write_blocks(payload.data, encoder, self._max_piece_bytes, self._append, self._count)
        chain = self.chains.setdefault(encoder.descriptors, len(self.chains))
        self.blocks[offset] = blocks
        size = self._position - offset
        return offset, size, 0, size, _RAW, value, chain

    def _append(self, data: Buffer) -> None:
        """Append bytes that may change afterwards."""
        self._position += len(data)
        if len(data) > CRC_BLOCK_MIN_BYTES:
            self._flush(data)
        else:
            self._pieces.append(bytes(data))
            if self._position - self._written >= PACK_BYTES:
                self._flush()

    def _form(self, key: str, payload: Payload, size: int) -> tuple[Frame | None, int, int]:
        """Return frame, lead and alignment of a raw payload; cached, since thousands of payloads may be alike."""
        item_bytes = _item_bytes(key, payload, size)
        frame = tensor_frame(payload.dtype or "", payload.sizes, item_bytes) if self._framed else None
        form = frame, len(frame.prefix) if frame else 0, alignment(Framing.RAW, size, item_bytes, framed=self._framed)
        self._forms[payload.dtype, payload.sizes, size] = form
        return form

    def _encoded(self, key: str, payload: Payload) -> tuple[Payload, int]:
        """Encode a payload with its frame; returns the encoded bytes, and the number of the chain."""
        frame = None
        if payload.framing == _RAW:
            frame, *_ = self._form(key, payload, _size_of(key, payload.data))
        names = tuple(encoder.get_descriptor() for encoder in payload.encoders)
        chain = self.chains.setdefault(names, len(self.chains))
        data = encode_payload(payload.data, frame, payload.encoders, self._max_piece_bytes, self._count)
        return Payload(data, payload.framing if frame is None else Framing.TORCH_ZIP), chain

    def close(self) -> None:
        """Write buffered bytes to the sink, and complete the file."""
        self._flush()
        begun = time.perf_counter()
        self._sink.close(sync=self._sync)
        if self._gauge is not None:
            self._gauge.close(time.perf_counter() - begun)

    def abort(self) -> None:
        """Abort the write: remove the data file."""
        self._pieces.clear()
        self._sink.abort()

    def _end_frame(self, frame: Frame, value: int) -> None:
        suffix = frame.suffix(value)
        self._pieces.append(suffix)
        self._position += len(suffix)

    def _stream(self, data: Buffer | PiecewiseData, size: int, *, counted: bool) -> int:
        """Write a large payload from its own memory, without a copy; returns its CRC32."""
        running = RunningCrc(size)
        stable = isinstance(data, _IN_MEMORY)
        pieces = (data,) if isinstance(data, _IN_MEMORY) else data.pieces(self._max_piece_bytes)
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), STEP_BYTES):
                part = view[start : start + STEP_BYTES]
                running.update(part)
                self._position += len(part)
                self._flush(part, stable=stable)
                if counted:
                    self._count(len(part))
        if len(borders := running.borders()):
            self.running_crcs.append(borders)
        return running.value

    def _flush(self, *more: Buffer, stable: bool = False) -> None:
        if self._pieces or more:
            pieces = self._collected()
            if stable and self._sink.keeps_stable:
                self._sink.write(pieces)
                for buffer in more:
                    self._sink.write_stable(buffer)
            else:
                self._sink.write([*pieces, *more])
            self._written = self._position
            if self._uncounted:
                self._count(self._uncounted)
                self._uncounted = 0
            if self._gauge is not None and not self._measured:
                self._measure(self._gauge)
            if self._sync and self._written - self._sync_started >= SYNC_STEP_BYTES:
                self._sink.start_sync()
                self._sync_started = self._written

    def _collected(self) -> list[Buffer]:
        """Return the small pieces since the last flush, joined unless the sink refers to some of them."""
        pieces, self._pieces = self._pieces, []
        if self._sink.refers or not pieces:
            return pieces
        return [b"".join(pieces)]

    def _measure(self, gauge: RateGauge) -> None:
        """Report the first bytes of the file, once they are durable (without `sync`: once they are written)."""
        if gauge.file_bytes is None or self._written < gauge.file_bytes:
            return
        self._measured, written = True, time.perf_counter()
        if not self._sync or self._sink.wait_sync():
            gauge.note(self._written, written - self._begun, time.perf_counter() - written)


def alignment(framing: Framing, size: int, item_bytes: int, *, framed: bool) -> int:
    """Return the alignment of a payload in its file, bytes.

    Args:
        framing: Framing of the item.
        size: Length of the payload, bytes.
        item_bytes: Length of one element, bytes.
        framed: Whether the payload gets an archive frame around it.
    """
    if framing is Framing.OBJECT or (size == 0 and not framed):
        return 1
    if framing is Framing.RAW and not framed and size < ALIGNMENT_BYTES:
        # The largest power of two that divides it: future packed dtypes may have other sizes.
        return item_bytes & -item_bytes
    return ALIGNMENT_BYTES


def _size_of(key: str, data: Buffer | PiecewiseData) -> int:
    """Return the size of a payload in bytes; raises ValueError if it is not contiguous."""
    if isinstance(data, memoryview) and (data.ndim != 1 or data.itemsize != 1 or not data.c_contiguous):
        raise ValueError(f"the payload of {key!r} must be one-dimensional contiguous bytes, not {data.format!r} data")
    return len(data) if isinstance(data, _IN_MEMORY) else data.nbytes


def _joined(data: PiecewiseData, max_bytes: int) -> bytes:
    # One copy of each piece: `join` would request all pieces before it copies the first.
    return b"".join([bytes(piece) for piece in data.pieces(max_bytes)])


def _item_bytes(key: str, payload: Payload, size: int) -> int:
    """Return the bytes per element; for a dtype unknown to this package, derived from the payload's length."""
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

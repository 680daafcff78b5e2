"""Reads of encoded blocks: no byte is decoded before its block's CRC has been checked."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np

from dcp_io.requests import BlockDecoder, ReadRequest
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.index.columns import CRC_BLOCK_MIN_BYTES, EncodedBlocks, Framing, StoredItem

_NO_BORDERS = np.zeros(0, np.uint32)


def with_blocks_apart(requests: Iterable[ReadRequest], *, whole: bool) -> list[ReadRequest]:
    """Replace requests for encoded items by one request per needed block, or per block with `whole`."""
    apart: list[ReadRequest] = []
    for request in requests:
        if request.decoder is None:
            apart.append(request)
        else:
            apart += _BlockRead(request, request.decoder).requests(whole=whole)
    return apart


class _BlockRead:
    def __init__(self, request: ReadRequest, decoder: BlockDecoder) -> None:
        item = request.item
        if item.blocks is None or not 0 <= request.start <= request.stop <= request.decoded_bytes:
            raise ValueError(
                f"bytes {request.start} to {request.stop} of {request.key!r} are outside its decoded blocks"
            )
        if request.into is not None and (len(request.into) != request.stop - request.start or request.piece):
            raise ValueError(f"the destination of {request.key!r} does not have the requested size")
        self._request = request
        self._decoder = decoder
        self._blocks: EncodedBlocks = item.blocks
        step = self._blocks.block_bytes
        if step < 1 or -(-request.decoded_bytes // step) != len(self._blocks.lengths):
            raise CorruptCheckpointError(
                f"the index gives {len(self._blocks.lengths)} blocks of {step} bytes for {request.decoded_bytes}",
                file=item.file,
                key=request.key,
                offset=item.offset,
            )
        self._memory: memoryview | None = None
        self._left = 0
        self._lock = threading.Lock()

    def requests(self, *, whole: bool) -> Iterator[ReadRequest]:
        """The original request is complete when all of these are."""
        request, step = self._request, self._blocks.block_bytes
        first, last = request.start // step, -(-request.stop // step)
        wanted = {n for n in range(first, last) if self._has_some(n * step, (n + 1) * step)}
        if not wanted:
            if request.done is not None or request.into is not None:
                yield ReadRequest(request.key, request.item, 0, 0, memoryview(bytearray()), request.done)
            return
        self._left = len(wanted)
        if request.into is None and request.piece is None:
            self._memory = np.empty(request.stop - request.start, np.uint8).data
        position = 0
        for number, (length, crc) in enumerate(
            zip(self._blocks.lengths.tolist(), self._blocks.crcs.tolist(), strict=True)
        ):
            if whole or number in wanted:
                yield self._block(number, position, length, crc, wanted=number in wanted)
            position += length

    def _has_some(self, start: int, stop: int) -> bool:
        runs = self._request.runs
        if runs is None or self._request.piece is None:
            return True
        starts, _ = runs.within(start, stop)
        return len(starts) > 0

    def _block(self, number: int, position: int, length: int, crc: int, *, wanted: bool) -> ReadRequest:
        item = self._request.item
        stored = StoredItem(
            file=item.file,
            offset=item.offset + item.lead + position,
            length=length,
            lead=0,
            stored_bytes=length,
            framing=Framing.RAW,
            crc32=crc,
            running_crcs=_NO_BORDERS if length <= CRC_BLOCK_MIN_BYTES else None,
        )

        def done(data: memoryview) -> None:
            if wanted:
                self._take(number, stored, data)

        return ReadRequest(self._request.key, stored, 0, length, None, done)

    def _take(self, number: int, stored: StoredItem, data: memoryview) -> None:
        request, step = self._request, self._blocks.block_bytes
        start, stop = number * step, min((number + 1) * step, request.decoded_bytes)
        first, last = max(start, request.start), min(stop, request.stop)
        target = request.into if self._memory is None else self._memory
        place = None if target is None else target[first - request.start : last - request.start]
        if place is not None and (first, last) == (start, stop):
            self._decode(number, stored, data, place)
        else:
            decoded = np.empty(stop - start, np.uint8).data
            self._decode(number, stored, data, decoded)
            part = decoded[first - start : last - start]
            if place is not None:
                place[:] = part
            elif request.piece is not None:
                request.piece(first, part)
        with self._lock:
            self._left -= 1
            finished = self._left == 0
        if finished and request.done is not None:
            request.done(target if target is not None else memoryview(bytearray()))

    def _decode(self, number: int, stored: StoredItem, data: memoryview, into: memoryview) -> None:
        try:
            self._decoder.decode(data, into)
        except Exception as error:
            raise CorruptCheckpointError(
                f"block {number} of the stored data cannot be decoded, although its CRC is correct: "
                f"{type(error).__name__}: {error}",
                file=stored.file,
                key=self._request.key,
                offset=stored.offset,
            ) from error

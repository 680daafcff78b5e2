"""Requests to the byte engine, and protocols of their data and encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal, Protocol, get_args

import numpy as np

from dcp_manifest.index.columns import Framing, StoredItem
from dcp_manifest.index.runs import Runs

_PIECE_BYTES = 64 << 20


class PiecewiseData(Protocol):
    """Bytes that are produced piece by piece during the write, to save memory."""

    @property
    def nbytes(self) -> int:
        """Total size of all pieces."""
        ...

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes in pieces of at most `max_bytes`, or a single larger element.

        A piece is valid until the next one is requested; a read-only piece stays valid. Data that waits for its bytes
        calls `dcp_io.workers.check_stop`, so that a failed write ends.
        """
        ...


def whole_bytes(data: PiecewiseData) -> memoryview:
    """Return all bytes of `data` in new memory: each piece is copied before the next one replaces it."""
    whole, position = np.empty(data.nbytes, np.uint8).data, 0
    for piece in data.pieces(_PIECE_BYTES):
        whole[position : position + piece.nbytes] = piece.cast("B")
        position += piece.nbytes
    return whole


class StreamEncoder(Protocol):
    """Encodes a stream of bytes. Thread-safe."""

    def get_descriptor(self) -> str:
        """Return the descriptor by which a reader finds the decoder."""
        ...

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that encodes to `output`; closing it completes `output`."""
        ...


class BlockEncoder(Protocol):
    """Encodes each block of an item separately."""

    @property
    def block_bytes(self) -> int:
        """Size before encoding, except the last block's."""
        ...

    @property
    def descriptors(self) -> tuple[str, ...]:
        """Descriptors of the decoders, in decoding order."""
        ...

    def encode(self, block: memoryview) -> bytes | bytearray | memoryview:
        """Encode one block; a writable result is valid until the same thread encodes the next block."""
        ...


class BlockDecoder(Protocol):
    """Decodes an item's blocks. Thread-safe."""

    def decode(self, data: memoryview, into: memoryview) -> None:
        """Decode a block into `into`; raises if lengths differ."""
        ...


@dataclass(slots=True)
class Payload:
    """The bytes of one item."""

    data: memoryview | bytes | PiecewiseData
    """One-dimensional contiguous bytes, which must not change until the write is done."""
    framing: Framing
    dtype: str | None = None
    """Torch dtype, without `torch.`, of a raw tensor chunk."""
    sizes: tuple[int, ...] = ()
    """Its sizes, in elements."""
    encoders: tuple[StreamEncoder, ...] = ()
    """Transforms in decoding order: the last one encodes first."""
    blocks: BlockEncoder | None = None
    """Used instead of `encoders`."""


class Alike(Protocol):
    """Small raw tensor chunks with the same dtype and sizes."""

    @property
    def dtype(self) -> str:
        """Torch dtype, without `torch.`."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes per chunk, in elements."""
        ...

    def resolve(self, requests: Sequence[Any]) -> bytes | memoryview:
        """Return the requests' concatenated payloads."""
        ...


class Writable(Protocol):
    """Request to write one item."""

    @property
    def key(self) -> str:
        """FQN, for error messages."""
        ...

    @property
    def cost_bytes(self) -> int:
        """Estimated size, by which threads are balanced."""
        ...

    @property
    def alike(self) -> Alike | None:
        """Group of tensors with which to resolve it."""
        ...

    def resolve(self) -> Payload:
        """Return the payload; called once, in a writer thread."""
        ...


@dataclass(slots=True)
class WriteRequest:
    """A simple `Writable`."""

    key: str
    cost_bytes: int
    resolve: Callable[[], Payload]
    alike: Alike | None = None


@dataclass(slots=True)
class ReadRequest:
    """Request to read a byte range of one stored item.

    All positions are byte positions in the item's stored range; for an item in encoded blocks, in its decoded bytes.
    The bytes are delivered in one of three ways:

    - `into`: they are written to this buffer.
    - `piece`: this callback gets disjoint pieces (position, bytes), in any order, in parallel from several threads.
      Inner borders are multiples of the item's CRC block. If the item has CRCs at block borders, a piece is verified
      before the call. If it has a single CRC, the check comes before `done`.
    - neither: `done` receives all bytes, which takes memory for all of them.

    A view passed to `piece` or `done` is valid only during the call, unless it is `into`.
    """

    key: str
    """FQN, for error messages."""
    item: StoredItem
    start: int
    stop: int
    into: memoryview | None = None
    """Writable buffer of `stop - start` bytes."""
    done: Callable[[memoryview], None] | None = None
    """Called once, in a reader thread, after all bytes were verified and delivered, with `into`, an empty view after
    `piece`, or the bytes.
    """
    piece: Callable[[int, memoryview], None] | None = None
    runs: Runs | None = None
    """With `piece`: the needed byte runs; bytes between them are undefined."""
    decoder: BlockDecoder | None = None
    decoded_bytes: int = 0
    """Size of all decoded blocks."""


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Statistics of a batch of reads."""

    bytes_read: int
    """Bytes that this process read."""
    unverified_keys: frozenset[str] = frozenset()
    """Keys of items without CRCs."""
    bytes_received: int = 0
    """Bytes that other processes read for it."""


Layout = Literal["torch", "raw"]
"""Layout of data files. `torch`: every tensor item is an archive that `torch.load` opens, and stock can read the
checkpoint. `raw`: aligned bytes, smaller and faster, not readable by stock.
"""

Verify = Literal["blocks", "full", "before"] | bool
"""CRC checks of the data that are read. `blocks` (or True): the CRC blocks that a read overlaps, and a single CRC only
if the whole item is read. `full`: whole items, even if only a slice is requested. `before`: like `blocks`, but before
any destination changes (read twice). False: no checks.
"""

_VERIFY = ("blocks", "full", "before", True, False)


def check_options(
    *,
    layout: object = "torch",
    verify: object = "blocks",
    thread_count: int | None = None,
    max_inflight_bytes: int | None = None,
) -> None:
    """Raise ValueError for an invalid `Layout` or `Verify`, or a number below 1."""
    for name, number in (("thread_count", thread_count), ("max_inflight_bytes", max_inflight_bytes)):
        if number is not None and number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
    for name, value, choices in (("layout", layout, get_args(Layout)), ("verify", verify, _VERIFY)):
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, choices))}")

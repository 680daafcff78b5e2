"""Requests to the byte engine: items to write, byte ranges to read, and protocols of their data and encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

from dcp_manifest.index.items import Framing, StoredItem
from dcp_manifest.index.runs import Runs

__all__ = [
    "Alike",
    "BlockDecoder",
    "BlockEncoder",
    "Payload",
    "PiecewiseData",
    "RateGauge",
    "ReadRequest",
    "ReadStats",
    "StreamEncoder",
    "Writable",
    "WriteRequest",
]


class PiecewiseData(Protocol):
    """Source of bytes that are produced piece by piece during the write, to save memory.

    Used for tensors that are not contiguous in host memory: on a device, or with other strides.
    """

    @property
    def nbytes(self) -> int:
        """Total size of all pieces, bytes."""
        ...

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes in order. A piece is valid until the next piece is requested.

        Args:
            max_bytes: Limit of the size of one piece; a single element may exceed it.
        """
        ...


class StreamEncoder(Protocol):
    """Transform that encodes a stream of bytes before they are stored; used by several threads at once."""

    def get_descriptor(self) -> str:
        """Return the transform's descriptor, which is stored in the index; a reader finds the decoder by it."""
        ...

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that encodes its input and writes the result to `output`; closing it completes `output`."""
        ...


class BlockEncoder(Protocol):
    """Transform that encodes each block of an item separately before it is stored."""

    @property
    def block_bytes(self) -> int:
        """Size of each block before encoding, bytes; the last block may be shorter."""
        ...

    @property
    def descriptors(self) -> tuple[str, ...]:
        """Descriptors of the transforms in decoding order, stored in the index; a reader finds the decoders by them."""
        ...

    def encode(self, block: memoryview) -> bytes | bytearray | memoryview:
        """Encode one block; the result is valid until the same thread encodes the next block."""
        ...


class RateGauge(Protocol):
    """Observer of a write that wants to know early how fast the storage makes bytes durable."""

    @property
    def file_bytes(self) -> int | None:
        """After how many bytes a file is measured, once; None for not at all. Read after `begin`."""
        ...

    def begin(self, files: int) -> None:
        """Prepare for a write in this number of threads, before the first byte is written."""
        ...

    def note(self, nbytes: int, write_seconds: float, sync_seconds: float) -> None:
        """Record the first bytes of a file: time until they were written, and then until they were durable.

        Called in the thread that writes the file. A storage that cannot make a part of a file durable never calls it.
        """
        ...

    def close(self, sync_seconds: float) -> None:
        """Record how long a file took from its last write until it was complete and durable."""
        ...


class BlockDecoder(Protocol):
    """Decoder of an item's blocks; used by several threads at once."""

    def decode(self, data: memoryview, into: memoryview) -> None:
        """Decode an encoded block into `into`; raises an error if the decoded length differs from that of `into`."""
        ...


@dataclass(slots=True)
class Payload:
    """The bytes of one item, ready to be written."""

    data: memoryview | bytes | PiecewiseData
    """One-dimensional contiguous bytes; the memory must not change until the write is done."""
    framing: Framing
    dtype: str | None = None
    """Name of the torch dtype, without `torch.`, of a raw tensor chunk; None for other payloads."""
    sizes: tuple[int, ...] = ()
    """Sizes of a raw tensor chunk, in elements."""
    encoders: tuple[StreamEncoder, ...] = ()
    """Stream transforms in decoding order: the last transform encodes first."""
    blocks: BlockEncoder | None = None
    """Encoder of the blocks of a raw tensor chunk, instead of `encoders`."""


class Alike(Protocol):
    """Group of small raw tensor chunks with the same dtype and sizes, whose payloads are resolved in one call."""

    @property
    def dtype(self) -> str:
        """Dtype of the payloads: the torch dtype's name without `torch.`."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of each payload's chunk, in elements."""
        ...

    def resolve(self, requests: Sequence[Any]) -> bytes | memoryview:
        """Return the payloads of the given requests of this group, concatenated."""
        ...


class Writable(Protocol):
    """Protocol of a request to write one item; `WriteRequest` implements it.

    A request may also have optional attributes: `alike`, the `Alike` that it shares with the other requests of a group
    of small tensors with one dtype and size, whose bytes are then fetched together, or None; `urgent`, whether it is
    written before all requests that are not; `abandon`, a function without arguments that is called when the write
    fails in any thread, so that a payload that waits for its bytes stops waiting and raises.
    """

    @property
    def key(self) -> str:
        """FQN of the item, for error messages."""
        ...

    @property
    def cost_bytes(self) -> int:
        """Estimated size, bytes; used to balance the writer threads."""
        ...

    def resolve(self) -> Payload:
        """Return the payload; called once, in a writer thread, when the item is written."""
        ...


@dataclass(slots=True)
class WriteRequest:
    """Request to write one item: the dataclass that implements `Writable`."""

    key: str
    """FQN of the item, for error messages."""
    cost_bytes: int
    """Estimated size, bytes; used to balance the writer threads."""
    resolve: Callable[[], Payload]
    """Returns the payload; called once, in a writer thread, when the item is written."""


@dataclass(slots=True)
class ReadRequest:
    """Request to read a byte range of one stored item.

    `start` and `stop`, like all positions below, are byte positions in the item's stored range; for an item in encoded
    blocks, in its decoded bytes. The bytes are delivered in one of three ways:

    - `into`: the bytes are written to this buffer.
    - `piece`: this callback is called with disjoint pieces (position in the stored range, bytes), in any order, from
      any thread and from several at once. Inner borders are multiples of the item's CRC block. If the item has CRCs at
      block borders, a piece is verified before the call; if it has a single CRC, the check comes before `done`.
    - neither: `done` receives all bytes at once, which takes memory for all of them.

    A view passed to `piece` or `done` is valid only during the call, unless it is `into`.
    """

    key: str
    """FQN of the item, for error messages."""
    item: StoredItem
    start: int
    stop: int
    into: memoryview | None = None
    """Writable buffer of exactly `stop - start` bytes."""
    done: Callable[[memoryview], None] | None = None
    """Called once, in a reader thread, after all bytes were verified and delivered. The argument is `into` if there is
    one, an empty view after `piece`, otherwise the bytes."""
    piece: Callable[[int, memoryview], None] | None = None
    runs: Runs | None = None
    """With `piece`: the byte runs in [start, stop) that are needed; the bytes between them are undefined, and may not
    be read."""
    decoder: BlockDecoder | None = None
    """Decoder of an item in encoded blocks."""
    decoded_bytes: int = 0
    """Decoded size of all blocks of an item in encoded blocks, bytes."""


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Statistics of a batch of reads: number of bytes, and keys of items without CRCs."""

    bytes_read: int
    """Number of bytes that this process read from storage."""
    unverified_keys: frozenset[str] = frozenset()
    """Keys of requests for items without CRCs."""
    bytes_received: int = 0
    """Number of bytes that other processes read from storage for this process."""

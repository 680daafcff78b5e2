"""Requests that a checkpoint storage makes of the engine: items to write, byte ranges to read."""

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
    "ReadRequest",
    "ReadStats",
    "StreamEncoder",
    "Writable",
    "WriteRequest",
]


class PiecewiseData(Protocol):
    """Bytes that are made piece by piece while they are written, since all of them at once would take much memory.

    For tensors that are not one run of bytes in this process's memory: on a device, or laid out otherwise.
    """

    @property
    def nbytes(self) -> int:
        """How many bytes the pieces have together."""
        ...

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes in order. A piece is valid until the next one is requested.

        Args:
            max_bytes: Limit of the memory held at a time, as far as one element fits into it.
        """
        ...


class StreamEncoder(Protocol):
    """A transform that bytes go through before they are stored; used by several threads at once."""

    def get_descriptor(self) -> str:
        """Return its name in the index, by which a reader finds the decoder."""
        ...

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that writes its input, encoded, to `output`; complete when it is closed."""
        ...


class BlockEncoder(Protocol):
    """Encoder of the blocks of one item, each alone, before they are stored."""

    @property
    def block_bytes(self) -> int:
        """Bytes of each block before it is encoded; the last one may be shorter."""
        ...

    @property
    def descriptors(self) -> tuple[str, ...]:
        """Names in the index, by which a reader finds the decoders; in the order of decoding."""
        ...

    def encode(self, block: memoryview) -> bytes | bytearray | memoryview:
        """Return one block, encoded; valid until the same thread encodes the next one."""
        ...


class BlockDecoder(Protocol):
    """Decoder of an item's blocks; used by several threads at once."""

    def decode(self, data: memoryview, into: memoryview) -> None:
        """Decode an encoded block into `into`; raises if the result has another length."""
        ...


@dataclass(slots=True)
class Payload:
    """The bytes of one item, ready to be written."""

    data: memoryview | bytes | PiecewiseData
    """One-dimensional, contiguous, of bytes; the memory must stay unchanged until the write is done."""
    framing: Framing
    dtype: str | None = None
    """Dtype of a RAW payload: the torch dtype's name without `torch.`."""
    sizes: tuple[int, ...] = ()
    """Sizes of a RAW payload's chunk, in elements."""
    encoders: tuple[StreamEncoder, ...] = ()
    """Transforms to go through: the last one first, so that a reader undoes them in this order."""
    blocks: BlockEncoder | None = None
    """Encoder of a RAW payload's blocks, instead of `encoders`."""


class Alike(Protocol):
    """Bare payloads of one dtype and one size, each of few bytes, which are resolved together."""

    @property
    def dtype(self) -> str:
        """See `Payload`."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """See `Payload`."""
        ...

    def resolve(self, requests: Sequence[Any]) -> bytes | memoryview:
        """Return the payloads of some requests, one after another."""
        ...


class Writable(Protocol):
    """Contract of one item to write: a `WriteRequest`, or anything like it.

    It may have an attribute `alike`: an `Alike`, the same object for many requests, or None.
    """

    @property
    def key(self) -> str:
        """FQN, for messages."""
        ...

    @property
    def cost_bytes(self) -> int:
        """Estimated size in bytes: writers are balanced by it."""
        ...

    def resolve(self) -> Payload:
        """Return the payload; called once, in a writer thread, when the item is written."""
        ...


@dataclass(slots=True)
class WriteRequest:
    """A request to write one item, as data."""

    key: str
    """FQN, for messages."""
    cost_bytes: int
    """Estimated size in bytes: writers are balanced by it."""
    resolve: Callable[[], Payload]
    """Returns the payload; called once, in a writer thread, when the item is written."""


@dataclass(slots=True)
class ReadRequest:
    """A request to read a byte range of one stored item.

    `start` and `stop` count bytes within the stored range; of an item in encoded blocks, within what these become, and
    so do all positions below. Who reads them takes the bytes in one of three ways:

    - `into`: they are put there.
    - `piece`: they come in disjoint pieces, in any order and in any thread, several at a time. Each is given by its
      position in the stored range and its bytes; inner borders are multiples of the item's CRC block. Where the item
      has CRCs at block borders a piece is verified before; where it has one for all of it, or none, before `done`.
    - neither: `done` gets all of them at once, which takes memory for all of them.

    A view that `piece` or `done` is given is only valid during the call, unless it is `into`.
    """

    key: str
    """FQN, for messages."""
    item: StoredItem
    start: int
    stop: int
    into: memoryview | None = None
    """Writable, of exactly `stop - start` bytes."""
    done: Callable[[memoryview], None] | None = None
    """Called once, in some reading thread, when everything is verified and handed over: with `into`, with nothing
    after `piece`, else with the bytes."""
    piece: Callable[[int, memoryview], None] | None = None
    runs: Runs | None = None
    """With `piece`: the bytes of [start, stop) that are wanted; what pieces hold between them is undefined, and need
    not be read."""
    decoder: BlockDecoder | None = None
    """Decoder of an item in encoded blocks."""
    decoded_bytes: int = 0
    """Decoded size of all blocks of an item in encoded blocks."""


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Statistics of a batch of reads."""

    bytes_read: int
    unverified_keys: frozenset[str] = frozenset()
    """Keys of requests whose bytes no CRC verifies."""

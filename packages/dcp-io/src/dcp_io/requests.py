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
        """The bytes in order. A piece stays as it is until the next one is asked for.

        Args:
            max_bytes: At most so much memory is held at a time, as far as one element fits into it.
        """
        ...


class StreamEncoder(Protocol):
    """A transform that bytes go through before they are stored; used by several threads at once."""

    def get_descriptor(self) -> str:
        """Its name in the index, from which a reader finds what undoes it."""
        ...

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """A stream whose input goes, encoded, to `output`; complete when it is closed."""
        ...


class BlockEncoder(Protocol):
    """What the blocks of one item go through, each alone, before they are stored."""

    @property
    def block_bytes(self) -> int:
        """Bytes of each block before it is encoded; the last one may be shorter."""
        ...

    @property
    def descriptors(self) -> tuple[str, ...]:
        """Names in the index, from which a reader finds what undoes it; in the order in which it undoes them."""
        ...

    def encode(self, block: memoryview) -> bytes | bytearray | memoryview:
        """One block, encoded; valid until the same thread asks for the next one."""
        ...


class BlockDecoder(Protocol):
    """What undoes the encoding of an item's blocks; used by several threads at once."""

    def decode(self, data: memoryview, into: memoryview) -> None:
        """Fill `into` with what the encoded block becomes; raises if that is anything else than so many bytes."""
        ...


@dataclass(slots=True)
class Payload:
    """The bytes of one item, ready to be written."""

    data: memoryview | bytes | PiecewiseData
    """One-dimensional, contiguous, of bytes; the memory must stay unchanged until the write is done."""
    framing: Framing
    dtype: str | None = None
    """Of a RAW payload: the torch dtype's name without `torch.`."""
    sizes: tuple[int, ...] = ()
    """Of a RAW payload: the chunk's sizes in elements."""
    encoders: tuple[StreamEncoder, ...] = ()
    """Transforms to go through: the last one first, so that a reader undoes them in this order."""
    blocks: BlockEncoder | None = None
    """Of a RAW payload, instead of `encoders`: what encodes it block by block."""


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
        """The payloads of some requests, one after another."""
        ...


class Writable(Protocol):
    """One item to write: a `WriteRequest`, or anything that looks like one.

    It may have an attribute `alike`: an `Alike`, the same object for many requests, or None.
    """

    @property
    def key(self) -> str:
        """FQN, for messages."""
        ...

    @property
    def cost_bytes(self) -> int:
        """About how many bytes it will take: writers are balanced by it."""
        ...

    def resolve(self) -> Payload:
        """The payload; asked for once, in a writer thread, when its turn has come."""
        ...


@dataclass(slots=True)
class WriteRequest:
    """One item to write, as data."""

    key: str
    """FQN, for messages."""
    cost_bytes: int
    """About how many bytes it will take: writers are balanced by it."""
    resolve: Callable[[], Payload]
    """Gives the payload; called once, in a writer thread, when its turn has come."""


@dataclass(slots=True)
class ReadRequest:
    """A byte range of one stored item that somebody wants.

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
    """Of an item in encoded blocks: what decodes them."""
    decoded_bytes: int = 0
    """Of an item in encoded blocks: what all of them become together."""


@dataclass(frozen=True, slots=True)
class ReadStats:
    """What a batch of reads cost."""

    bytes_read: int
    unverified_keys: frozenset[str] = frozenset()
    """Keys of requests whose bytes no CRC vouches for."""

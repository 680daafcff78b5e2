"""Requests that planners' storages hand to an IO engine: items to write, byte ranges to read.

They live beside the records of stored items so that a torch-side storage and a torch-free engine meet without
importing each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dcp_manifest.items import Framing, StoredItem

__all__ = ["Payload", "ReadRequest", "ReadStats", "WriteRequest"]


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of one item, ready to be written."""

    data: memoryview | bytes
    """One-dimensional, contiguous, of bytes; the memory must stay unchanged until the write is done."""
    framing: Framing
    dtype: str | None = None
    """Of a RAW payload: the torch dtype's name without `torch.`."""
    sizes: tuple[int, ...] = ()
    """Of a RAW payload: the chunk's sizes in elements."""


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """One item to write."""

    key: str
    """FQN, for messages."""
    cost_bytes: int
    """About how many bytes it will take: writers are balanced by it."""
    resolve: Callable[[], Payload]
    """Gives the payload; called once, in a writer thread, when its turn has come."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A byte range of one stored item that somebody wants.

    `start` and `stop` count bytes within the stored range. The bytes are put into `into` if it is given (of exactly
    `stop - start` bytes); then `done` is called with them, in the reading thread, once they are verified.
    """

    key: str
    item: StoredItem
    start: int
    stop: int
    into: memoryview | None = None
    done: Callable[[memoryview], None] | None = None


@dataclass(frozen=True, slots=True)
class ReadStats:
    """What a batch of reads cost."""

    bytes_read: int
    unverified_keys: frozenset[str] = frozenset()
    """Keys of requests whose bytes no CRC vouches for."""

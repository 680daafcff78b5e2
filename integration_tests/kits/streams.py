"""Streams of several ranks in one process, and a recording handler."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from dcp_ranks.streams.reception import NOT_NOW, NotNow
from dcp_ranks.streams.stream import Stream
from dcp_ranks.streams.streams import Streams

__all__ = ["Inbox", "connect_all", "opened"]

_TIMEOUT_SECONDS = 120.0
SECRET = b"secret of the job, for tests alone"


@dataclass
class Inbox:
    """Handler that keeps all messages, payloads, descriptors, goodbyes and losses.

    Attributes:
        may_take: Returns whether to take a message now; else the handler returns `NOT_NOW`.
        buffer_for: Returns the buffer for a payload of a size; None to discard it.
    """

    may_take: Callable[[bytes], bool] = lambda _: True
    buffer_for: Callable[[int], Any] = bytearray
    messages: list[tuple[int, bytes]] = field(default_factory=list)
    payloads: list[tuple[int, bytes, memoryview]] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)
    refused: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def on_message(
        self, stream: Stream, message: bytes, payload_bytes: int, descriptor: int | None
    ) -> memoryview | NotNow | None:
        with self.changed:
            self.changed.notify_all()
            if not self.may_take(message):
                self.refused += 1
                return NOT_NOW
            self.messages.append((stream.rank, message))
            if descriptor is not None:
                self.descriptors.append(descriptor)
            buffer = self.buffer_for(payload_bytes) if payload_bytes else None
            return None if buffer is None else memoryview(buffer)

    def on_payload(self, stream: Stream, message: bytes, buffer: memoryview) -> None:
        with self.changed:
            self.payloads.append((stream.rank, message, buffer))
            self.changed.notify_all()

    def on_goodbye(self, stream: Stream) -> None:
        with self.changed:
            self.left.append(stream.rank)
            self.changed.notify_all()

    def on_lost(self, stream: Stream, reason: str) -> None:
        with self.changed:
            self.lost.append((stream.rank, reason))
            self.changed.notify_all()

    def wait(self, ready: Callable[[], object]) -> None:
        """Wait until `ready`, called after each event, returns true. Fails after 60 s."""
        with self.changed:
            assert self.changed.wait_for(ready, _TIMEOUT_SECONDS), f"nothing more came than {self}"


@contextlib.contextmanager
def opened(count: int, *, local: bool = True, **options: Any) -> Iterator[list[Streams]]:
    """Open the streams of `count` ranks in this process, over Unix sockets or TCP."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Streams(rank, SECRET, **options)) for rank in range(count)]
        cards = [each.card if local else replace(each.card, local="") for each in made]
        for each in made:
            each.meet(cards)
        yield made


def connect_all(made: list[Streams], timeout_seconds: float = _TIMEOUT_SECONDS) -> list[dict[int, Stream]]:
    """Connect all ranks of one process; return each rank's streams by rank."""

    def connect(own: int) -> dict[int, Stream]:
        others = [rank for rank in range(len(made)) if rank != own]
        found = made[own].connect_many(others, timeout_seconds)
        streams = {rank: stream for rank, stream in found.items() if isinstance(stream, Stream)}
        assert len(streams) == len(others), found
        return streams

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(connect, range(len(made))))

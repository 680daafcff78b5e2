"""`Peer`: a client's connection in the keeper, which never waits for the client."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from dcp_memory.keeper.arenas import Borrower
from dcp_memory.keeper.catalogue import Reservation, StoredObject
from dcp_memory.wire import GREETING_BYTES, HEAD, decode_head, decode_json, encode

_READ_BYTES = 1 << 20


class Peer:
    """A connection, and all that its client has. It never blocks; `number` is never used again."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        self.socket = connection
        self.borrower = Borrower(number)
        self.greeted = False
        """Whether the client has said what it is."""
        self.keeps_alive = False
        """Whether the client writes or borrows: then the keeper is not idle."""
        self.since = time.monotonic()
        self.reservations: dict[int, Reservation] = {}
        self.opened: dict[int, StoredObject] = {}
        self._next = 0
        self._incoming = bytearray()
        self._wanted = HEAD.size
        self._sizes: tuple[int, int] | None = None
        self._outgoing: list[memoryview] = []
        self._descriptor: int | None = None

    @property
    def number(self) -> int:
        """Number of the connection."""
        return self.borrower.number

    @property
    def has_output(self) -> bool:
        """Whether part of an answer is unsent."""
        return bool(self._outgoing)

    def new_number(self) -> int:
        """Return an unused number."""
        self._next += 1
        return self._next

    def receive(self) -> dict[str, Any] | None:
        """Return the fields of a complete request, with its `payload`, or None.

        Raises ValueError if the bytes are not a request, ConnectionError at the connection's end.
        """
        while True:
            if self._wanted:
                try:
                    data = self.socket.recv(min(self._wanted, _READ_BYTES))
                except (BlockingIOError, InterruptedError):
                    return None
                if not data:
                    raise ConnectionResetError("the client has closed the connection")
                self._incoming += data
                self._wanted -= len(data)
                continue
            if self._sizes is None:
                _, *sizes = decode_head(self._incoming, None if self.greeted else GREETING_BYTES)
                self._sizes = sizes[0], sizes[1]
                self._incoming.clear()
                self._wanted = sum(sizes)
                continue
            (json_bytes, _), received = self._sizes, self._incoming
            self._sizes, self._incoming, self._wanted = None, bytearray(), HEAD.size
            view = memoryview(received)
            return {**decode_json(view[:json_bytes]), "payload": bytes(view[json_bytes:])}

    def answer(
        self, fields: Mapping[str, Any], payload: bytes | memoryview = b"", *, descriptor: int | None = None
    ) -> None:
        """Queue an answer, and send what the client takes immediately.

        The payload is not copied. The descriptor is closed here once it has been sent.
        """
        self._descriptor = descriptor
        self._outgoing = [memoryview(encode(fields, len(payload), descriptor=descriptor is not None))]
        if payload:
            self._outgoing.append(memoryview(payload))
        self.send()

    def send(self) -> None:
        """Send what the client takes; raise ConnectionError if it is gone."""
        while self._outgoing:
            try:
                if self._descriptor is not None:
                    sent = socket.send_fds(self.socket, self._outgoing[:1], [self._descriptor])
                else:
                    sent = self.socket.sendmsg(self._outgoing)
            except (BlockingIOError, InterruptedError):
                return
            self._close_descriptor()
            while sent:
                first = self._outgoing[0]
                if sent < len(first):
                    self._outgoing[0] = first[sent:]
                    break
                sent -= len(first)
                self._outgoing.pop(0)

    def close(self) -> None:
        """Close the connection."""
        self._outgoing.clear()
        self._close_descriptor()
        self.socket.close()

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

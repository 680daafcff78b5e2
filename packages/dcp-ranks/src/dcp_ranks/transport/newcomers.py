"""Incoming connections that are not yet authenticated, with limits of their number and age.

Not in this module: the authentication (see `handshake`), and waiting for data.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from dcp_ranks.transport.connection import Link

__all__ = ["Guests"]

MAX_GUESTS = 32
"""Largest number of unauthenticated connections; beyond it the oldest is closed, and its rank may connect again."""
GUEST_SECONDS = 10.0
_ACCEPTED_AT_ONCE = 64


class Guests:
    """The incoming connections of one rank that are not yet authenticated."""

    def __init__(self) -> None:
        self._came: dict[Link, float] = {}

    @property
    def waiting(self) -> list[Link]:
        """All unauthenticated connections, the oldest first."""
        return [*self._came]

    def accept(self, door: socket.socket, peer_timeout_seconds: float) -> Iterator[Link]:
        """Accept the pending connections of a listening socket, at most 64 per call, and yield each one.

        Args:
            door: Listening socket, in non-blocking mode.
            peer_timeout_seconds: Time in seconds without an answer of the other host that breaks a connection.
        """
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = door.accept()
            except OSError:  # no connection waits, or it is gone again, or no descriptor left
                return
            link = Link(connection, peer_timeout_seconds)
            self._came[link] = time.monotonic()
            yield link

    def forget(self, link: Link) -> None:
        """Remove a connection that has been authenticated or closed."""
        self._came.pop(link, None)

    def unwelcome(self) -> list[Link]:
        """Return the connections to close: those unauthenticated for 10 s, or else the oldest ones beyond the limit."""
        before = time.monotonic() - GUEST_SECONDS
        late = [link for link, came in self._came.items() if came < before]
        return late or [*self._came][: max(0, len(self._came) - MAX_GUESTS)]

"""Incoming connections that have not yet proved that they belong to the job: limited in number and in time.

Not in this module: the proof, and waiting.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from dcp_ranks.transport.connection import Link

__all__ = ["Guests"]

MAX_GUESTS = 32
"""Limit of unproved connections; beyond it the oldest is closed: a rank sends its proof at once, and may reconnect."""
GUEST_SECONDS = 10.0
_ACCEPTED_AT_ONCE = 64


class Guests:
    """The connections of one rank that have not proved themselves."""

    def __init__(self) -> None:
        self._came: dict[Link, float] = {}

    @property
    def waiting(self) -> list[Link]:
        """All of these connections."""
        return [*self._came]

    def accept(self, door: socket.socket, peer_timeout_seconds: float) -> Iterator[Link]:
        """Accept pending connections of a listening socket, but only a few at a time, so that other work goes on.

        Args:
            door: Listening socket, in non-blocking mode.
            peer_timeout_seconds: See `Link`.
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
        """Remove a connection that has proved itself, or has been closed."""
        self._came.pop(link, None)

    def unwelcome(self) -> list[Link]:
        """Return the connections to close: those without a valid proof for too long, and the oldest of too many."""
        before = time.monotonic() - GUEST_SECONDS
        late = [link for link, came in self._came.items() if came < before]
        return late or [*self._came][: max(0, len(self._came) - MAX_GUESTS)]

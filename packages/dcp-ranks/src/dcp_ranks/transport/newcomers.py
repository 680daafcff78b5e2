"""Connections that have come in and not proved yet that they belong to the job: few, and not for long.

Not here: what proves it, and waiting.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from dcp_ranks.transport.connection import Link

__all__ = ["Guests"]

MAX_GUESTS = 32
"""More than that, and the one that came first has to go: a rank sends its proof at once, and may come again."""
GUEST_SECONDS = 10.0
_ACCEPTED_AT_ONCE = 64


class Guests:
    """The connections of one rank that have not proved themselves."""

    def __init__(self) -> None:
        self._came: dict[Link, float] = {}

    @property
    def waiting(self) -> list[Link]:
        """All of them."""
        return [*self._came]

    def accept(self, door: socket.socket, peer_timeout_seconds: float) -> Iterator[Link]:
        """Take connections that wait at a door, but not so many that nothing else is done.

        Args:
            door: A listening socket that does not block.
            peer_timeout_seconds: See `Link`.
        """
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = door.accept()
            except OSError:  # nobody more, or gone again, or no descriptor left
                return
            link = Link(connection, peer_timeout_seconds)
            self._came[link] = time.monotonic()
            yield link

    def forget(self, link: Link) -> None:
        """A connection has proved itself, or has been closed."""
        self._came.pop(link, None)

    def unwelcome(self) -> list[Link]:
        """The connections to close: those that have said nothing of use for too long, and the first of too many."""
        before = time.monotonic() - GUEST_SECONDS
        late = [link for link, came in self._came.items() if came < before]
        return late or [*self._came][: max(0, len(self._came) - MAX_GUESTS)]

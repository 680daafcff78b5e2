"""Incoming connections that are not yet authenticated, with limits of their number and age.

Not in this module: the authentication (see `handshake`), and waiting for data.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Guests"]

MAX_GUESTS = 32
"""Largest number of unauthenticated connections; beyond it the oldest is closed, and its rank may connect again."""
GUEST_SECONDS = 10.0
_ACCEPTED_AT_ONCE = 64

Guest = TypeVar("Guest")


class Guests(Generic[Guest]):
    """The incoming connections of one rank that are not yet authenticated.

    Args:
        receive: Function that is called with the socket of each new connection, and returns the object that stands for
            the connection from then on.
    """

    def __init__(self, receive: Callable[[socket.socket], Guest]) -> None:
        self._receive = receive
        self._came: dict[Guest, float] = {}

    @property
    def waiting(self) -> list[Guest]:
        """All unauthenticated connections, the oldest first."""
        return [*self._came]

    def accept(self, door: socket.socket) -> Iterator[Guest]:
        """Accept the pending connections of a listening socket, at most 64 per call, and yield each one.

        Args:
            door: Listening socket, in non-blocking mode.
        """
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = door.accept()
            except OSError:  # no connection waits, or it is gone again, or no descriptor left
                return
            guest = self._receive(connection)
            self._came[guest] = time.monotonic()
            yield guest

    def forget(self, guest: Guest) -> None:
        """Remove a connection that has been authenticated or closed."""
        self._came.pop(guest, None)

    def unwelcome(self) -> list[Guest]:
        """Return the connections to close: those unauthenticated for 10 s, or else the oldest ones beyond the limit."""
        before = time.monotonic() - GUEST_SECONDS
        late = [guest for guest, came in self._came.items() if came < before]
        return late or [*self._came][: max(0, len(self._came) - MAX_GUESTS)]

"""Connecting to several ranks at once: one loop that calls lower ranks and answers higher ranks.

Of two ranks the lower one listens and the higher one connects. Whoever waits here answers everybody, so that the order
in which ranks connect to each other does not matter. Not in this module: a single attempt, the use of streams.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

from dcp_ranks.streams.attempt import Attempt
from dcp_ranks.streams.greetings import Guest
from dcp_ranks.transport.handshake import Listener
from dcp_ranks.transport.newcomers import Guests

__all__ = ["Doorway", "meet_ranks"]

_LOOK_SECONDS: Final = 1.0


class Doorway:
    """The listening sockets of one rank, and the connections that have come in.

    Args:
        doors: Listening sockets in non-blocking mode; this object closes them.
        listener: Listening side of the handshake.
    """

    def __init__(self, doors: Iterable[socket.socket], listener: Listener) -> None:
        self.doors = {door.fileno(): door for door in doors}
        self.arrived: dict[int, socket.socket] = {}
        """Rank → authenticated connection that nobody has taken yet."""
        self.refused = ""
        """What was wrong with the last connection that was refused; empty if none was."""
        self._listener = listener
        self._guests: Guests[Guest] = Guests(Guest)

    @property
    def guests(self) -> list[Guest]:
        """The connections that are not yet authenticated."""
        return self._guests.waiting

    def accept(self, door: socket.socket) -> None:
        """Accept the pending connections of a listening socket, and answer those that have sent a greeting."""
        for guest in self._guests.accept(door):
            self.greet(guest)

    def greet(self, guest: Guest) -> None:
        """Answer a connection whose greeting has arrived; close it if it does not belong to this job."""
        try:
            rank = guest.greet(self._listener)
        except OSError as error:
            self.refused = str(error)
            self._guests.forget(guest)
            guest.close()
            return
        if rank is not None:
            self._guests.forget(guest)
            if rank in self.arrived:  # which the other rank has given up
                self.arrived[rank].close()
            self.arrived[rank] = guest.connection

    def has(self, rank: int) -> bool:
        """Return whether a rank has connected, and has not given up since."""
        connection = self.arrived.get(rank)
        if connection is None:
            return False
        with contextlib.suppress(BlockingIOError, InterruptedError):  # nothing was sent yet: it lives
            if not _peek(connection):
                self.arrived.pop(rank).close()
                return False
        return True

    def see_out(self) -> None:
        """Close the connections that have taken too long to authenticate, or are too many."""
        for guest in self._guests.unwelcome():
            self._guests.forget(guest)
            guest.close()

    def close(self) -> None:
        """Close all listening sockets, and all connections that nobody has taken."""
        for connection in (*self.doors.values(), *self.arrived.values()):
            connection.close()
        self.doors.clear()
        self.arrived.clear()
        for guest in self.guests:
            self._guests.forget(guest)
            guest.close()


def meet_ranks(
    doorway: Doorway,
    attempts: Collection[Attempt],
    awaited: Collection[int],
    deadline: float,
    lost: Callable[[], Collection[int]],
) -> None:
    """Wait until all attempts have ended and all awaited ranks have connected, at most until the deadline.

    Nobody is waited for once a rank is lost: the others may have ended the operation because of that.

    Args:
        doorway: Listening sockets of this rank; its `arrived` gets the ranks that connect.
        attempts: Attempts to connect to lower ranks, not yet begun.
        awaited: Higher ranks, which connect to this one.
        deadline: Time of the monotonic clock in seconds.
        lost: Function that returns the ranks that are known to be lost.
    """
    while True:
        now = time.monotonic()
        for attempt in attempts:
            if _is_open(attempt) and now >= attempt.until:
                attempt.step(now)
        pending = [attempt for attempt in attempts if _is_open(attempt)]
        if now >= deadline or lost() or not (pending or any(not doorway.has(rank) for rank in awaited)):
            return
        until = min([deadline, now + _LOOK_SECONDS, *(attempt.until for attempt in pending)])
        _wait(doorway, pending, max(0.0, until - now))


def _peek(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except ConnectionError:
        return b""


def _is_open(attempt: Attempt) -> bool:
    return not (attempt.is_done or attempt.has_failed)


def _wait(doorway: Doorway, pending: Iterable[Attempt], seconds: float) -> None:
    """Wait for the first events, and handle all that have come."""
    poller = select.poll()
    handlers: dict[int, Callable[[], None]] = {}

    def watch(descriptor: int, events: int, handle: Callable[[], None]) -> None:
        poller.register(descriptor, events)
        handlers[descriptor] = handle

    for descriptor, door in doorway.doors.items():
        watch(descriptor, select.POLLIN, lambda door=door: doorway.accept(door))  # type: ignore[misc]
    for guest in doorway.guests:
        watch(guest.fileno(), select.POLLIN, lambda guest=guest: doorway.greet(guest))  # type: ignore[misc]
    for attempt in pending:
        if attempt.connection is not None:
            step = lambda attempt=attempt: attempt.step(time.monotonic())  # noqa: E731
            watch(attempt.connection.fileno(), attempt.events, step)
    for descriptor, _ in poller.poll(seconds * 1000):
        handlers[descriptor]()
    doorway.see_out()

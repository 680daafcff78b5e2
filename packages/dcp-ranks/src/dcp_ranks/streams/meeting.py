"""Connect to several ranks in one loop: of two ranks, the lower listens and the higher connects.

A waiting rank answers every caller, so ranks may connect in any order.
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
from dcp_ranks.transport.listening import Guests, Listener

_POLL_SECONDS: Final = 1.0


class Doorway:
    """Non-blocking listening sockets, and their incoming connections."""

    def __init__(self, doors: Iterable[socket.socket], listener: Listener) -> None:
        self.doors = {door.fileno(): door for door in doors}
        self.arrived: dict[int, socket.socket] = {}
        """Rank → authenticated connection, not yet taken."""
        self.refused = ""
        """Why the last connection was refused, if any."""
        self._listener = listener
        self.guests: Guests[Guest] = Guests(Guest)

    def accept(self, door: socket.socket) -> None:
        """Accept pending connections, and answer their greetings."""
        for guest in self.guests.accept(door):
            self.greet(guest)

    def greet(self, guest: Guest) -> None:
        """Answer a complete greeting; close another job's connection."""
        try:
            rank = guest.greet(self._listener)
        except OSError as error:
            self.refused = str(error)
            self.guests.forget(guest)
            guest.close()
            return
        if rank is not None:
            self.guests.forget(guest)
            if rank in self.arrived:  # the other rank has abandoned the earlier connection
                self.arrived[rank].close()
            self.arrived[rank] = guest.connection

    def has(self, rank: int) -> bool:
        """Return whether a rank is connected."""
        connection = self.arrived.get(rank)
        if connection is None:
            return False
        with contextlib.suppress(BlockingIOError, InterruptedError):  # no bytes wait: the connection is alive
            try:
                is_alive = bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            except ConnectionError:
                is_alive = False
            if not is_alive:
                self.arrived.pop(rank).close()
                return False
        return True

    def see_out(self) -> None:
        """Close connections that authenticate too slowly, or exceed the limit."""
        for guest in self.guests.unwelcome():
            self.guests.forget(guest)
            guest.close()

    def close(self) -> None:
        """Close all sockets that were not taken."""
        for connection in (*self.doors.values(), *self.arrived.values()):
            connection.close()
        self.doors.clear()
        self.arrived.clear()
        for guest in [*self.guests.waiting]:
            self.guests.forget(guest)
            guest.close()


def meet_ranks(
    doorway: Doorway,
    attempts: Collection[Attempt],
    awaited: Collection[int],
    deadline: float,
    lost: Callable[[], Collection[int]],
) -> None:
    """Wait until attempts have ended and `awaited` ranks have come, the deadline passes, or a rank is lost."""
    while True:
        now = time.monotonic()
        for attempt in attempts:
            if _is_open(attempt) and now >= attempt.until:
                attempt.step(now)
        pending = [attempt for attempt in attempts if _is_open(attempt)]
        if now >= deadline or lost() or not (pending or any(not doorway.has(rank) for rank in awaited)):
            return
        until = min([deadline, now + _POLL_SECONDS, *(attempt.until for attempt in pending)])
        _wait(doorway, pending, max(0.0, until - now))


def _is_open(attempt: Attempt) -> bool:
    return not (attempt.is_done or attempt.has_failed)


def _wait(doorway: Doorway, pending: Iterable[Attempt], seconds: float) -> None:
    poller = select.poll()
    handlers: dict[int, Callable[[], None]] = {}

    def watch(descriptor: int, events: int, handle: Callable[[], None]) -> None:
        poller.register(descriptor, events)
        handlers[descriptor] = handle

    for descriptor, door in doorway.doors.items():
        watch(descriptor, select.POLLIN, lambda door=door: doorway.accept(door))  # type: ignore[misc]
    for guest in doorway.guests.waiting:
        watch(guest.fileno(), select.POLLIN, lambda guest=guest: doorway.greet(guest))  # type: ignore[misc]
    for attempt in pending:
        if attempt.connection is not None:
            step = lambda attempt=attempt: attempt.step(time.monotonic())  # noqa: E731
            watch(attempt.connection.fileno(), attempt.events, step)
    for descriptor, _ in poller.poll(seconds * 1000):
        handlers[descriptor]()
    doorway.see_out()

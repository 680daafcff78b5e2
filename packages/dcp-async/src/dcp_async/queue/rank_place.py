"""A rank's place among the savers of its group, and the coordinators that it gets there; in the trainer or a worker.

Not here: which saves there are.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from dcp_core import PeerOptions
from dcp_core.errors import RANK_ERRORS
from dcp_ranks import (
    STORE_TIMEOUT,
    Coordinator,
    KeyValueStore,
    LocalCoordinator,
    Peers,
    StoreCoordinator,
    connect_store,
    guard_store,
    prefixed_store,
)

__all__ = ["Meeting", "Seat", "StoreAddress", "Ticket"]


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a process connects to meet the other ranks: a TCP store, and the prefix of the keys there."""

    host: str
    port: int
    prefix: str

    def connect(self) -> KeyValueStore:
        """A connection of one's own. Raises CoordinatorLostError at once if nobody listens there."""
        with guard_store("(connecting)", RANK_ERRORS):
            try:  # torch would try for a minute
                socket.create_connection((self.host, self.port), STORE_TIMEOUT.total_seconds()).close()
            except OSError as error:
                raise RuntimeError(f"{self.host}:{self.port}: {error}") from error
            return prefixed_store(self.prefix, connect_store(self.host, self.port))


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in a group. Travels to a worker once for each group."""

    key: str
    """Tells the group from others of this process."""
    rank: int
    world_size: int
    job_size: int
    hosts_store: bool
    address: StoreAddress | None
    """None for a rank that saves alone."""
    timeout_seconds: float
    peers: PeerOptions


@dataclass(frozen=True, slots=True)
class Ticket:
    """One save's number in its group, drawn in the thread that started it, and how often workers had ended by then."""

    sequence: int
    epoch: int = 0
    overlap: str = ""
    """The policy of the rank that drew this number first; empty if it is not known."""


class Meeting:
    """Coordinators for one save after the other.

    Args:
        seat: This rank's place.
        store: The store under the savers' prefix; nobody else uses this connection. None to connect to the address.
    """

    def __init__(self, seat: Seat, store: KeyValueStore | None = None) -> None:
        self.seat = seat
        if store is None and seat.address is not None:
            store = seat.address.connect()
        self.store = store
        self._epoch = -1
        self._peers: Peers | None = None

    def coordinator(self, ticket: Ticket, *, watch: bool = True) -> Coordinator:
        """The coordinator of one save; waits for no rank.

        Args:
            ticket: Of the save.
            watch: Watch the other ranks' savers, and let them watch this process.
        """
        seat = self.seat
        if self.store is None:
            return LocalCoordinator(errors=RANK_ERRORS)
        if watch:
            self._renew_peers(ticket)
        return StoreCoordinator(
            self.store,
            seat.rank,
            seat.world_size,
            sequence=ticket.sequence,
            timeout_seconds=seat.timeout_seconds,
            hosts_store=seat.hosts_store,
            peers=self._peers if watch else None,
            errors=RANK_ERRORS,
        )

    def close(self) -> None:
        """Let go of the other ranks."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _renew_peers(self, ticket: Ticket) -> None:
        """Who watches whom: found anew by all ranks together when one of their workers is another process."""
        if self._peers is not None and self._epoch == ticket.epoch:
            return
        self.close()
        seat, store = self.seat, self.store
        if store is not None:
            # Under numbers of their own: those of `dcp_core`'s operations are positive.
            number = -1 - ticket.epoch
            self._peers = Peers(store, number, seat.rank, seat.world_size, 0, options=seat.peers, errors=RANK_ERRORS)
            self._epoch = ticket.epoch

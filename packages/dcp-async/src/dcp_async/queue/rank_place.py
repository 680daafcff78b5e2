"""A rank's place in a group of savers, and the coordinators of its saves; used in the trainer or in a worker.

The queue of saves is not in this module.
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
    """Address of the TCP store through which the ranks meet, and the prefix of its keys."""

    host: str
    port: int
    prefix: str

    def connect(self) -> KeyValueStore:
        """Connect to the store, over a new connection.

        Raises CoordinatorLostError at once if no server listens there.
        """
        with guard_store("(connecting)", RANK_ERRORS):
            try:  # torch would try for a minute
                socket.create_connection((self.host, self.port), STORE_TIMEOUT.total_seconds()).close()
            except OSError as error:
                raise RuntimeError(f"{self.host}:{self.port}: {error}") from error
            return prefixed_store(self.prefix, connect_store(self.host, self.port))


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in a group of savers: rank, sizes, store and timeouts. Sent to a worker once per group."""

    key: str
    """Key of the group, unique among the groups of this process."""
    rank: int
    world_size: int
    job_size: int
    hosts_store: bool
    address: StoreAddress | None
    """Address of the group's store; None for a rank that saves alone, or if other processes cannot reach the store."""
    timeout_seconds: float
    peers: PeerOptions


@dataclass(frozen=True, slots=True)
class Ticket:
    """A save's sequence number in its group, with the group's count of ended workers (`epoch`) at that time."""

    sequence: int
    epoch: int = 0
    overlap: str = ""
    """Overlap policy of the rank that drew this number first; empty if it is not known."""


class Meeting:
    """Factory of the coordinators of successive saves.

    Args:
        seat: This rank's place in the group.
        store: The store under the savers' prefix, over a connection that only this object uses; None connects to the
            address of `seat`.
    """

    def __init__(self, seat: Seat, store: KeyValueStore | None = None) -> None:
        self.seat = seat
        if store is None and seat.address is not None:
            store = seat.address.connect()
        self.store = store
        self._epoch = -1
        self._peers: Peers | None = None

    def coordinator(self, ticket: Ticket, *, watch: bool = True) -> Coordinator:
        """Return the coordinator of one save; does not wait for other ranks.

        Args:
            ticket: Sequence number and epoch of the save.
            watch: Whether this process watches the other ranks' savers, and lets them watch it.
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
        """Close the connections to the other ranks."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _renew_peers(self, ticket: Ticket) -> None:
        """Renew the peer connections on all ranks together, after a rank's worker was replaced."""
        if self._peers is not None and self._epoch == ticket.epoch:
            return
        self.close()
        seat, store = self.seat, self.store
        if store is not None:
            # Under numbers of their own: those of `dcp_core`'s operations are positive.
            number = -1 - ticket.epoch
            self._peers = Peers(store, number, seat.rank, seat.world_size, 0, options=seat.peers, errors=RANK_ERRORS)
            self._epoch = ticket.epoch

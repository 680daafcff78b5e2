"""Connection settings of a saver's rank (`Seat`), and the coordinators of its saves, in the trainer or in a worker.

Not in this module: the queue of saves.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
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
    TimedStore,
    connect_store,
    guard_store,
    prefixed_store,
)

__all__ = ["Meeting", "Seat", "SharedPeers", "StoreAddress", "Ticket"]


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Host and port of the TCP store through which ranks communicate, and the prefix of their keys."""

    host: str
    port: int
    prefix: str

    def connect(self) -> KeyValueStore:
        """Open a new connection to the store.

        Raises:
            CoordinatorLostError: No server listens at the address; raised without waiting.
        """
        with guard_store("(connecting)", RANK_ERRORS):
            try:  # torch would try for a minute
                socket.create_connection((self.host, self.port), STORE_TIMEOUT.total_seconds()).close()
            except OSError as error:
                raise RuntimeError(f"{self.host}:{self.port}: {error}") from error
            return prefixed_store(self.prefix, connect_store(self.host, self.port))


@dataclass(frozen=True, slots=True)
class Seat:
    """Connection settings of one rank's saver for a process group: rank, sizes, store address and timeouts.

    The trainer sends it to the worker process once for each group.

    Attributes:
        series: Number of the saver among those of the group; its saves are the operations of this series.
        rank: Rank within the group.
        world_size: Number of ranks in the group.
        job_size: Number of ranks in the whole job.
        hosts_store: Whether this rank's trainer may be the server of the store.
        timeout_seconds: Time in seconds that a rank waits for the other ranks in one phase.
        peers: Options for how ranks watch each other and connect to each other.
    """

    key: str
    """Identifier of the group, unique among the groups of this process."""
    series: int
    rank: int
    world_size: int
    job_size: int
    hosts_store: bool
    address: StoreAddress | None
    """Address of the group's store; None if the rank saves alone, or if a worker process cannot reach the store."""
    timeout_seconds: float
    peers: PeerOptions


@dataclass(frozen=True, slots=True)
class Ticket:
    """Number of one save in its group, the same on all ranks.

    Attributes:
        sequence: Sequence number of the save.
        epoch: Number of worker processes of the group that had ended before the save.
    """

    sequence: int
    epoch: int = 0
    overlap: str = ""
    """Overlap policy of the rank that drew this sequence number first; empty if unknown."""


@dataclass(frozen=True, slots=True)
class SharedPeers:
    """Monitor of a group's ranks, shared by all operations of this process.

    Attributes:
        peers: The monitor.
        store: Connection to the group's store, for the thread that uses the monitor here.
    """

    peers: Peers
    store: KeyValueStore


class Meeting:
    """Factory of coordinators, one for each save of a saver in one process group.

    Args:
        seat: Connection settings of this rank for the group.
        store: Store under the savers' key prefix, over a connection that nothing else uses; None opens a connection to
            the address in `seat`.
        shared: Monitor that this process shares with other operations of the group; None for monitors of the saver's
            own, which know a rank from the first phase of its first save on.
    """

    def __init__(self, seat: Seat, store: KeyValueStore | None = None, shared: SharedPeers | None = None) -> None:
        self.seat = seat
        self._shared = shared
        if store is None and seat.address is not None:
            store = TimedStore(seat.address.connect(), seat.timeout_seconds)
        self.store = store
        self._epoch = -1
        self._peers: Peers | None = None

    def coordinator(self, ticket: Ticket, *, watch: bool = True) -> Coordinator:
        """Return the coordinator of one save; does not wait for other ranks.

        Args:
            ticket: Sequence number and epoch of the save.
            watch: Whether this process and the other ranks' savers watch each other, to detect lost processes.
        """
        seat = self.seat
        if self.store is None:
            return LocalCoordinator(errors=RANK_ERRORS)
        shared = self._shared
        peers = None
        if watch:
            peers = self._renewed_peers(self.store, ticket) if shared is None else shared.peers
        return StoreCoordinator(
            self.store,
            seat.rank,
            seat.world_size,
            sequence=ticket.sequence,
            timeout_seconds=seat.timeout_seconds,
            hosts_store=seat.hosts_store,
            peers=peers,
            peers_store=None if shared is None else shared.store,
            series=seat.series,
            errors=RANK_ERRORS,
        )

    def give_up_on(self, ticket: Ticket, lost: Mapping[int, str]) -> None:
        """Make a save fail on all ranks for the loss of some, unless its first phase has ended.

        Args:
            ticket: Sequence number and epoch of the save, which a worker process runs.
            lost: Lost rank → description of its loss.
        """
        coordinator = self.coordinator(ticket, watch=False)
        if isinstance(coordinator, StoreCoordinator):
            coordinator.give_up_on(lost)

    def close(self) -> None:
        """Close the connections to the other ranks, except for those of a shared monitor."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _renewed_peers(self, store: KeyValueStore, ticket: Ticket) -> Peers:
        """Return this saver's monitor, a new one on all ranks together after a rank's worker was replaced."""
        if self._peers is None or self._epoch != ticket.epoch:
            self.close()
            seat = self.seat
            # Under numbers of their own: those of `dcp_core`'s operations are positive.
            number = -1 - ticket.epoch
            self._peers = Peers(store, number, seat.rank, seat.world_size, 0, options=seat.peers, errors=RANK_ERRORS)
            self._epoch = ticket.epoch
        return self._peers

"""Agreement of all ranks on sequence numbers of saves, and whether a save runs, is skipped or superseded.

Keys under `dcp-async/<group>/<saver>/`: the coordinators' keys, `epoch` (number of ended workers), and for each save
`epoch/<sequence>` (epoch and policy) and `fate/<sequence>` (whether it runs), set by the first rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dcp_async.errors import WorkerError
from dcp_async.options import SaverOptions
from dcp_core import PeerOptions
from dcp_core.errors import CoordinatorTimeoutError
from dcp_ranks import Coordinator, store_of
from dcp_ranks.interrupts import interrupts_deferred
from dcp_ranks.peers.monitor import Peers
from dcp_ranks.phases.collective_coordinator import CollectiveCoordinator
from dcp_ranks.phases.coordinator import LocalCoordinator
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.store_connections import borrow_store, make_peers, shared_peers, shared_store, start_prefix
from dcp_ranks.transport.store_wire import (
    STORE_TIMEOUT,
    KeyValueStore,
    StoreWire,
    TimedStore,
    connect_store,
    guard_store,
    innermost_store,
    prefixed_store,
)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Address of the ranks' TCP store, and a prefix."""

    host: str
    port: int
    prefix: str

    def connect(self) -> KeyValueStore:
        """Connect, or raise CoordinatorLostError without waiting."""
        with guard_store("(connecting)"):
            try:  # torch would try for a minute
                socket.create_connection((self.host, self.port), STORE_TIMEOUT.total_seconds()).close()
            except OSError as error:
                raise RuntimeError(f"{self.host}:{self.port}: {error}") from error
            return prefixed_store(self.prefix, connect_store(self.host, self.port))


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's connection settings of a process group; sent to the worker once.

    The saves are the operations of `series`. `hosts_store` is whether this trainer may be the store's server.
    """

    key: str
    """Unique among the groups of this process."""
    series: int
    rank: int
    world_size: int
    job_size: int
    hosts_store: bool
    address: StoreAddress | None
    """None if the rank saves alone, or if a worker cannot reach the store."""
    timeout_seconds: float
    peers: PeerOptions


@dataclass(frozen=True, slots=True)
class Ticket:
    """Number of one save, the same on all ranks; `epoch` counts the workers that ended before."""

    sequence: int
    epoch: int = 0
    overlap: str = ""
    """Policy of the rank that drew this number first."""


@dataclass(frozen=True, slots=True)
class SharedPeers:
    """Monitor of a group's ranks, and this thread's connection for it."""

    peers: Peers
    store: TimedStore


class Meeting:
    """Factory of coordinators, one for each save of a saver in one process group.

    `store` has its own connection; None connects to the address in `seat`. Without `shared`, the monitors know a rank
    only after the first phase of its first save.
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
        """Return a save's coordinator, without waiting; with `watch`, lost ranks are detected."""
        seat = self.seat
        if self.store is None:
            return LocalCoordinator()
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
        )

    def withdraw(self, ticket: Ticket, error: BaseException) -> None:
        """Make a save fail on all other ranks with `error`."""
        coordinator = self.coordinator(ticket, watch=False)
        coordinator.__exit__(type(error), error, error.__traceback__)

    def give_up_on(self, ticket: Ticket, lost: Mapping[int, str]) -> None:
        """Make a save fail on all ranks, unless its first phase has ended."""
        coordinator = self.coordinator(ticket, watch=False)
        if isinstance(coordinator, StoreCoordinator):
            coordinator.give_up_on(lost)

    def close(self) -> None:
        """Close connections, except a shared monitor's."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _renewed_peers(self, store: KeyValueStore, ticket: Ticket) -> Peers:
        if self._peers is None or self._epoch != ticket.epoch:
            self.close()
            seat = self.seat
            # Negative numbers are free: those of `dcp_core`'s operations are positive.
            number = -1 - ticket.epoch
            self._peers = make_peers(store, number, seat.rank, seat.world_size, 0, options=seat.peers)
            self._epoch = ticket.epoch
        return self._peers


_KEPT_SAVES = 1024


class GroupLink:
    """Link of a saver to a group's ranks; the base class is for a rank alone."""

    agrees = True
    """Whether ranks can agree to skip or supersede a save without waiting."""

    def __init__(self, seat: Seat, store: KeyValueStore | None = None, shared: SharedPeers | None = None) -> None:
        self.seat = seat
        self.meeting = Meeting(seat, store, shared)
        self._drawn = 0

    def draw(self, overlap: str = "") -> Ticket:
        """Return the next save's number, without waiting. Every rank draws once per save."""
        del overlap
        self._drawn += 1
        return Ticket(self._drawn)

    def take_number(self, overlap: str) -> Ticket:
        """Draw, but withdraw if a signal handler raises."""
        ticket = None
        try:
            with interrupts_deferred():
                ticket = self.draw(overlap)
        except BaseException as error:
            if ticket is not None:
                self.withdraw(ticket, error)
            raise
        return ticket

    def decide(self, ticket: Ticket, wish: str) -> str:
        """Return the first rank's `wish`: `go`, `skip` or `superseded`."""
        del ticket
        return wish

    def coordinator(self, ticket: Ticket) -> Coordinator:
        """Return the coordinator of a save."""
        return self.meeting.coordinator(ticket)

    def group_store(self) -> object:
        """Return the group's store, which a running save must keep referenced."""
        return None

    def withdraw(self, ticket: Ticket, error: BaseException) -> None:
        """Make a save fail on all other ranks with `error`."""
        self.meeting.withdraw(ticket, error)

    def report_losses(self, ticket: Ticket) -> None:
        """Make a save in a worker fail if a rank is lost; called from time to time.

        Workers watch each other only after their first phase.
        """

    def for_worker(self) -> Seat:
        """Return a worker's settings. Raises WorkerError without a reachable store."""
        return self.seat

    def worker_ended(self) -> None:
        """Notify all ranks that this rank's worker has ended."""


class StoreLink(GroupLink):
    """Link through the process group's store; `prefix` counts from the innermost store.

    The first of `group_stores` is for the thread that calls `save`, the second for saves in a thread of this process.
    """

    def __init__(self, seat: Seat, group: dist.ProcessGroup, group_stores: Sequence[TimedStore], prefix: str) -> None:
        store, background = (
            TimedStore(prefixed_store(prefix, innermost_store(each)), seat.timeout_seconds) for each in group_stores
        )
        # Left for the others now: this rank may be lost before its first save runs.
        peers = shared_peers(group, group_stores[0], 0, seat.peers)
        group_stores[0].rest()
        super().__init__(seat, background, SharedPeers(peers, group_stores[1]))
        self._shared = SharedPeers(peers, group_stores[0])
        self._reported: Ticket | None = None
        self._group = weakref.ref(group)
        self._store = store
        self._wire = StoreWire(store, "", seat.world_size)
        self._lock = threading.Lock()

    def draw(self, overlap: str = "") -> Ticket:
        """See `GroupLink.draw`."""
        with self._connection():
            sequence = StoreCoordinator.draw(self._store, self.seat.rank)
            claimed = self._wire.claim(f"epoch/{sequence}", f"{self._wire.add('epoch', 0)} {overlap}")
            epoch, _, first = claimed.partition(" ")
            if self.seat.rank == 0 and sequence > _KEPT_SAVES:  # no rank is that far behind
                self._wire.delete([f"{name}/{sequence - _KEPT_SAVES}" for name in ("epoch", "fate")])
        return Ticket(sequence, int(epoch), first)

    def decide(self, ticket: Ticket, wish: str) -> str:
        """See `GroupLink.decide`."""
        with self._connection():
            return self._wire.claim(f"fate/{ticket.sequence}", wish)

    def group_store(self) -> object:
        """See `GroupLink.group_store`."""
        group = self._group()
        return None if group is None else store_of(group)

    def withdraw(self, ticket: Ticket, error: BaseException) -> None:
        """See `GroupLink.withdraw`."""
        with self._connection():
            Meeting(self.seat, self._store).withdraw(ticket, error)

    def report_losses(self, ticket: Ticket) -> None:
        """See `GroupLink.report_losses`."""
        if self._reported == ticket:
            return
        peers = self._shared.peers
        with self._connection():
            peers.meet(self._shared.store, complete=False)
            self._shared.store.rest()
            peers.pause(0.0)
            if peers.lost:
                Meeting(self.seat, self._store).give_up_on(ticket, peers.lost)
                self._reported = ticket

    def for_worker(self) -> Seat:
        """See `GroupLink.for_worker`."""
        if self.seat.address is None:
            raise WorkerError(
                "the process group's store is no TCP store, so that a process saver cannot reach it; use the thread "
                "saver, or initialise the group with env:// or tcp://"
            )
        return self.seat

    def worker_ended(self) -> None:
        """Increment the epoch."""
        with self._connection():
            self._wire.add("epoch")

    @contextlib.contextmanager
    def _connection(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            finally:
                self._store.rest()


class CollectiveLink(GroupLink):
    """Link over a gloo group of the saver, without a usable store."""

    agrees = False

    def __init__(self, seat: Seat, group: dist.ProcessGroup) -> None:
        super().__init__(seat)
        backend = dist.get_backend(group)
        members = dist.get_process_group_ranks(group)
        # A fake group's other ranks do not exist.
        self._group = (
            group if backend == "fake" else dist.new_group(members, backend="gloo", use_local_synchronization=True)
        )
        self._coordinators: dict[Ticket, CollectiveCoordinator] = {}

    def draw(self, overlap: str = "") -> Ticket:
        """See `GroupLink.draw`; also makes the coordinator."""
        del overlap
        made = CollectiveCoordinator(self._group, timeout_seconds=self.seat.timeout_seconds)
        ticket = Ticket(made.sequence)
        self._coordinators[ticket] = made
        return ticket

    def coordinator(self, ticket: Ticket) -> Coordinator:
        """See `GroupLink.coordinator`; once per ticket."""
        return self._coordinators.pop(ticket)

    def withdraw(self, ticket: Ticket, error: BaseException) -> None:
        """See `GroupLink.withdraw`."""
        coordinator = self._coordinators.pop(ticket, None)
        if coordinator is not None:
            coordinator.__exit__(type(error), error, error.__traceback__)

    def for_worker(self) -> Seat:
        """Raise WorkerError."""
        raise WorkerError(
            "the process group has no store that a process saver can reach; use the thread saver, or initialise the "
            "group with env:// or tcp://"
        )


class LinkTable:
    """A saver's links, by process group."""

    def __init__(self, options: SaverOptions) -> None:
        self._options = options
        self._alone: GroupLink | None = None
        self._links: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupLink] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, group: dist.ProcessGroup | None, *, no_dist: bool) -> GroupLink:
        """Return the link for a process group; for this rank alone with `no_dist` or without other ranks. Thread-safe.

        Raises:
            ValueError: This process is not in the group.
            CoordinatorLostError: The group's store does not answer.

        Ranks: every rank of the group; the first call for a group is collective.
        """
        initialized = dist.is_available() and dist.is_initialized()
        job_size = dist.get_world_size() if initialized else 1
        if not no_dist and initialized:
            found = dist.group.WORLD if group is None else group
            rank = dist.get_rank(found)
            if found is None or rank < 0:
                raise ValueError("this process is not a rank of the process group: only its own ranks may save with it")
            if dist.get_world_size(found) > 1:
                with self._lock:
                    if found not in self._links:
                        self._links[found] = self._make(found, rank, job_size)
                    return self._links[found]
        if self._alone is None or self._alone.seat.job_size != job_size:
            self._alone = GroupLink(self._seat("alone", 0, 0, 1, job_size, None))
        return self._alone

    def _make(self, group: dist.ProcessGroup, rank: int, job_size: int) -> GroupLink:
        members = dist.get_process_group_ranks(group)
        # Disjoint groups may have one name.
        digest = hashlib.sha256(repr(members).encode()).hexdigest()[:12]
        key = f"{group.group_name}-{digest}"
        seconds = self._options.timeout_seconds
        try:
            peer_seconds = self._options.peers.peer_timeout_seconds
            stores = [borrow_store(group, seconds, peer_seconds) for _ in range(2)]
            connections = [each[0] for each in stores if each is not None]
            if not connections:
                return CollectiveLink(self._seat(key, 0, rank, len(members), job_size, None), group)
            base: Any = innermost_store(connections[0])
            number, prefix = self._number(group, key, connections[0])
            address = StoreAddress(base.host, base.port, prefix) if hasattr(base, "port") else None
            return StoreLink(self._seat(key, number, rank, len(members), job_size, address), group, connections, prefix)
        except CoordinatorTimeoutError:  # another rank is missing, so no rank waits for this one
            raise
        except Exception as error:
            with contextlib.suppress(Exception):  # the store is lost, most likely
                self._withdraw(group, key, rank, len(members), error)
            raise

    def _number(self, group: dist.ProcessGroup, key: str, store: TimedStore) -> tuple[int, str]:
        """Return this saver's number, by the order of creation on all ranks, and its prefix."""
        place = f"{start_prefix(group)}dcp-async/{key}"
        if group not in self._numbers:
            apart = TimedStore(innermost_store(store), store.timeout_seconds)
            self._numbers[group] = StoreWire(apart, f"{place}/savers/", 1).add(str(dist.get_rank(group)))
            apart.rest()
        number = self._numbers[group]
        return number, f"{place}/{number}"

    def _withdraw(self, group: dist.ProcessGroup, key: str, rank: int, world_size: int, error: Exception) -> None:
        store = shared_store(group, self._options.timeout_seconds)
        if store is None:
            return
        _, prefix = self._number(group, key, store)
        below = TimedStore(prefixed_store(prefix, innermost_store(store)), store.timeout_seconds)
        made = StoreCoordinator(below, rank, world_size)
        made.__exit__(type(error), error, error.__traceback__)

    def _seat(
        self, key: str, series: int, rank: int, world_size: int, job_size: int, address: StoreAddress | None
    ) -> Seat:
        hosts_store, seconds = job_size > 1 and dist.get_rank() == 0, self._options.timeout_seconds
        return Seat(key, series, rank, world_size, job_size, hosts_store, address, seconds, self._options.peers)

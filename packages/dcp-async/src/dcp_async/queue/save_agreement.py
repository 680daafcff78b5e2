"""Agreement of all ranks on asynchronous saves: sequence numbers, and whether a save runs, is skipped or superseded.

Keys in the store under `dcp-async/<group>/<saver>/`: the keys of the coordinators; `epoch`, the number of ended worker
processes; and for each save `epoch/<sequence>` (epoch and overlap policy) and `fate/<sequence>` (whether it runs), each
set by the first rank that needs the key.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from dcp_async.errors import WorkerError
from dcp_async.options import SaverOptions
from dcp_async.queue.rank_place import Meeting, Seat, SharedPeers, StoreAddress, Ticket
from dcp_core.errors import RANK_ERRORS
from dcp_ranks import (
    CollectiveCoordinator,
    Coordinator,
    KeyValueStore,
    StoreCoordinator,
    StoreWire,
    TimedStore,
    borrow_store,
    innermost_store,
    interrupts_deferred,
    prefixed_store,
    shared_peers,
    start_prefix,
    store_of,
)

__all__ = ["CollectiveLink", "GroupLink", "LinkTable", "StoreLink"]

_KEPT_SAVES = 1024


class GroupLink:
    """Link of a saver to the other ranks of one process group.

    This class is for a rank that saves alone, without communication; subclasses communicate with other ranks.

    Args:
        seat: Connection settings of this rank for the group.
        store: Connection to the store for saves that run in this process; None to open one if `seat` has an address.
        shared: Monitor of the group's ranks for saves that run in this process; see `Meeting`.
    """

    agrees = True
    """Whether ranks can agree to skip or supersede a save without waiting for each other."""

    def __init__(self, seat: Seat, store: KeyValueStore | None = None, shared: SharedPeers | None = None) -> None:
        self.seat = seat
        self.meeting = Meeting(seat, store, shared)
        """Factory of the coordinators of saves in this process, with its own connection to the store."""
        self._drawn = 0

    def draw(self, overlap: str = "") -> Ticket:
        """Return the sequence number of this rank's next save, which is the same on all ranks.

        Args:
            overlap: Overlap policy of this rank for the save, with which the other ranks compare theirs.

        Ranks: every rank of the group, once for each save; does not wait for other ranks.
        """
        del overlap
        self._drawn += 1
        return Ticket(self._drawn)

    def take_number(self, overlap: str) -> Ticket:
        """Return a sequence number as `draw` does, but withdraw from the save if a signal handler raises meanwhile."""
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
        """Return the decision of all ranks whether a save runs, is skipped or superseded: the first rank's proposal.

        Args:
            ticket: Sequence number of the save.
            wish: Proposal of this rank: `go`, `skip` or `superseded`.
        """
        del ticket
        return wish

    def coordinator(self, ticket: Ticket) -> Coordinator:
        """Return the coordinator for a save that runs in this process."""
        return self.meeting.coordinator(ticket)

    def group_store(self) -> object:
        """Return the group's store, which a running save must keep referenced; None if no store is used."""
        return None

    def withdraw(self, ticket: Ticket, error: BaseException) -> None:
        """Withdraw this rank from a save: the save fails on all other ranks with this rank's `error`."""
        coordinator = self.meeting.coordinator(ticket, watch=False)
        coordinator.__exit__(type(error), error, error.__traceback__)

    def report_losses(self, ticket: Ticket) -> None:
        """Make a save fail that a worker process runs and that waits for a lost rank; called from time to time.

        Worker processes watch each other only once they have met, in the first phase of their first save. A trainer
        may be lost before, even before its worker has started.
        """

    def for_worker(self) -> Seat:
        """Return the connection settings with which a worker process can save for this rank.

        Raises:
            WorkerError: A worker process cannot reach the other ranks, because the group's store is no TCP store.
        """
        return self.seat

    def worker_ended(self) -> None:
        """Notify all ranks that this rank's worker process has ended and will be replaced."""


class StoreLink(GroupLink):
    """Link of a saver to the other ranks through the process group's store.

    Args:
        seat: Connection settings of this rank for the group.
        group: The process group.
        group_stores: Two connections to the group's store: for the thread that calls `save`, and for saves that run in
            a thread of this process.
        prefix: Prefix of the saver's keys, counted from the innermost store.
    """

    def __init__(self, seat: Seat, group: dist.ProcessGroup, group_stores: Sequence[TimedStore], prefix: str) -> None:
        store, background = (
            TimedStore(prefixed_store(prefix, innermost_store(each)), seat.timeout_seconds) for each in group_stores
        )
        # Left for the others now: this rank may be lost before its first save runs.
        peers = shared_peers(group, group_stores[0], 0, seat.peers, RANK_ERRORS)
        super().__init__(seat, background, SharedPeers(peers, group_stores[1]))
        self._shared = SharedPeers(peers, group_stores[0])
        self._reported: Ticket | None = None
        self._group = weakref.ref(group)
        self._store = store
        self._wire = StoreWire(store, "", seat.world_size, errors=RANK_ERRORS)
        self._lock = threading.Lock()

    def draw(self, overlap: str = "") -> Ticket:
        """Return the sequence number of this rank's next save; see `GroupLink.draw`."""
        with self._lock:
            sequence = StoreCoordinator.draw(self._store, self.seat.rank, RANK_ERRORS)
            claimed = self._wire.claim(f"epoch/{sequence}", f"{self._wire.count('epoch')} {overlap}")
            epoch, _, first = claimed.partition(" ")
            if self.seat.rank == 0 and sequence > _KEPT_SAVES:  # no rank is that far behind
                self._wire.delete([f"{name}/{sequence - _KEPT_SAVES}" for name in ("epoch", "fate")])
        return Ticket(sequence, int(epoch), first)

    def decide(self, ticket: Ticket, wish: str) -> str:
        """Return the decision of all ranks about a save; see `GroupLink.decide`."""
        with self._lock:
            return self._wire.claim(f"fate/{ticket.sequence}", wish)

    def group_store(self) -> object:
        """Return the process group's store; see `GroupLink.group_store`."""
        group = self._group()
        return None if group is None else store_of(group)

    def withdraw(self, ticket: Ticket, error: BaseException) -> None:
        """Make a save fail on the other ranks, over the connection `store`; see `GroupLink.withdraw`."""
        with self._lock:
            coordinator = Meeting(self.seat, self._store).coordinator(ticket, watch=False)
            coordinator.__exit__(type(error), error, error.__traceback__)

    def report_losses(self, ticket: Ticket) -> None:
        """Make a save fail that waits for a lost rank; see `GroupLink.report_losses`."""
        if self._reported == ticket:
            return
        peers = self._shared.peers
        with self._lock:
            peers.look_around(self._shared.store)
            peers.pause(0.0)
            if peers.lost:
                Meeting(self.seat, self._store).give_up_on(ticket, peers.lost)
                self._reported = ticket

    def for_worker(self) -> Seat:
        """Return the connection settings for a worker process; see `GroupLink.for_worker`."""
        if self.seat.address is None:
            raise WorkerError(
                "the process group's store is no TCP store, so that a process saver cannot reach it; use the thread "
                "saver, or initialise the group with env:// or tcp://"
            )
        return self.seat

    def worker_ended(self) -> None:
        """Notify all ranks that this rank's worker process has ended; see `GroupLink.worker_ended`."""
        with self._lock:
            self._wire.add("epoch")


class CollectiveLink(GroupLink):
    """Link of a saver to the other ranks over a gloo group that only the saver uses, if no store can be used.

    Args:
        seat: Connection settings of this rank for the group.
        group: Process group of the trainer.
    """

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
        """Return the sequence number of this rank's next save; see `GroupLink.draw`."""
        del overlap
        made = CollectiveCoordinator(self._group, timeout_seconds=self.seat.timeout_seconds, errors=RANK_ERRORS)
        ticket = Ticket(made.sequence)
        self._coordinators[ticket] = made
        return ticket

    def coordinator(self, ticket: Ticket) -> Coordinator:
        """Return the coordinator for a save; see `GroupLink.coordinator`."""
        return self._coordinators.pop(ticket)

    def withdraw(self, ticket: Ticket, error: BaseException) -> None:
        """Make a save fail on the other ranks; see `GroupLink.withdraw`."""
        coordinator = self._coordinators.pop(ticket, None)
        if coordinator is not None:
            coordinator.__exit__(type(error), error, error.__traceback__)

    def for_worker(self) -> Seat:
        """Return the connection settings for a worker process; see `GroupLink.for_worker`."""
        raise WorkerError(
            "the process group has no store that a process saver can reach; use the thread saver, or initialise the "
            "group with env:// or tcp://"
        )


class LinkTable:
    """Table of one saver's links to other ranks: process group → `GroupLink`.

    Args:
        options: Options of the saver.
    """

    def __init__(self, options: SaverOptions) -> None:
        self._options = options
        self._alone: GroupLink | None = None
        self._links: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupLink] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, group: dist.ProcessGroup | None, *, no_dist: bool) -> GroupLink:
        """Return the link for a process group; None is the default group. Thread-safe.

        With `no_dist`, or without other ranks, the link is that of a rank that saves alone.

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
        stores = [borrow_store(group, RANK_ERRORS, self._options.timeout_seconds) for _ in range(2)]
        connections = [each[0] for each in stores if each is not None]
        seconds = self._options.timeout_seconds
        if len(connections) < 2 or dist.get_backend(group) == "fake":
            return CollectiveLink(self._seat(key, 0, rank, len(members), job_size, None), group)
        base: Any = innermost_store(connections[0])
        place = f"{start_prefix(group)}dcp-async/{key}"
        # Savers of one group, one after the other or side by side, are kept apart: ranks make them in the same order.
        number = StoreWire(TimedStore(base, seconds), f"{place}/savers/", 1, errors=RANK_ERRORS).add(str(rank))
        prefix = f"{place}/{number}"
        address = StoreAddress(base.host, base.port, prefix) if hasattr(base, "port") else None
        return StoreLink(self._seat(key, number, rank, len(members), job_size, address), group, connections, prefix)

    def _seat(
        self, key: str, series: int, rank: int, world_size: int, job_size: int, address: StoreAddress | None
    ) -> Seat:
        hosts_store, seconds = job_size > 1 and dist.get_rank() == 0, self._options.timeout_seconds
        return Seat(key, series, rank, world_size, job_size, hosts_store, address, seconds, self._options.peers)

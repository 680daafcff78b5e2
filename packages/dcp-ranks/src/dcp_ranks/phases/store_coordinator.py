"""Coordinator over a process group's store: no collectives, concurrent operations, any backend.

`dcp/drawn/<rank>` counts operations. Under `dcp/<sequence>/` are `nonce`, `closed`, `ticket/<queue>` (tickets taken),
and for each phase under `<number>/`: `up/<rank>` (a rank's outcome), `arrived` (number of ranks), `ready` (all have
arrived or one has failed), `verdict`, `each/<rank>` (values of `scattered` phases). Ranks delete keys that only they
use, the coordinator deletes keys that all have read, and the last rank to close deletes the rest.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from dcp_ranks.errors import CoordinatorLostError, OperationError
from dcp_ranks.peers.monitor import Peers
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS
from dcp_ranks.phases.leaders import RelayRound, Relays
from dcp_ranks.phases.phases import Answer, Failure, Outcome, PhasedCoordinator, Verdict
from dcp_ranks.phases.store_phase import Seat, StoreRound
from dcp_ranks.transport.store_wire import KeyValueStore, StoreWire, TimedStore

_LINGER_TIMEOUT_SECONDS = 5.0
_LINGER_AFTER_FAILURE_TIMEOUT_SECONDS = 1.0
_SEE_SECONDS = 0.5


class StoreCoordinator(PhasedCoordinator):
    """Coordinator of ranks that communicate through a store. A rank may use several at the same time, in any threads.

    The constructor draws the operation's sequence number without waiting. All ranks must construct their coordinators
    in the same order, before any user code runs.

    Args:
        store: Connection to the store; no other coordinator may use it at the same time (see `borrow_store`).
        rank: Rank of this process within the group.
        world_size: Number of ranks in the group.
        coordinator_rank: Rank within the group that runs each `reduce_fn`.
        sequence: Sequence number from `draw`; None to draw one.
        timeout_seconds: Seconds that a rank waits in one phase for half of the others, and then for the rest.
        hosts_store: Whether this process may be the store's server: `close` then waits seconds at most until every rank
            has read the last phase's result.
        release: Called by `close` if the connection can be reused.
        peers: Monitor that detects lost ranks and, in large groups, sends the messages; with None, lost ranks are
            detected only at the deadline.
        peers_store: Connection under the prefix of `peers`; None if `store` has that prefix.
        series: Number of the series of operations, if several share one monitor; 0 for the process group's own.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        world_size: int,
        *,
        coordinator_rank: int = 0,
        sequence: int | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        hosts_store: bool = False,
        release: Callable[[], None] | None = None,
        peers: Peers | None = None,
        peers_store: KeyValueStore | None = None,
        series: int = 0,
    ) -> None:
        super().__init__(rank, world_size, coordinator_rank)
        self.sequence = self.draw(store, rank) if sequence is None else sequence
        self._wire = StoreWire(store, f"dcp/{self.sequence}/", world_size)
        self._seat = Seat(rank, world_size, coordinator_rank, timeout_seconds)
        self.store = store
        self._peers = peers
        self._peers_store = store if peers_store is None else peers_store
        self._relays = peers if isinstance(peers, Relays) else None
        self._operation, self._first_relayed = 0, 1
        if self._relays is not None:
            self._operation, self._first_relayed = self._relays.begin(self._peers_store, series, self.sequence)
        self._hosts_store = hosts_store
        self._release = release
        # Until the next phase is complete, some rank may still have to read the verdict of the one before.
        self._unread: deque[list[str]] = deque(maxlen=2)
        self._phase: StoreRound | None = None
        self._lost = False
        self._closed = False
        self._queues = 0
        self._ticket_lock = threading.Lock()

    @staticmethod
    def draw(store: KeyValueStore, rank: int) -> int:
        """Draw the sequence number of this rank's next operation, which the other ranks then wait for."""
        return StoreWire(store, "dcp/", 1).add(f"drawn/{rank}")

    def lost_ranks(self) -> Mapping[int, str]:
        """See `Coordinator.lost_ranks`."""
        if self._peers is None:
            return {}
        self._peers.pause(0.0)
        return self._peers.lost

    def give_up_on(self, lost: Mapping[int, str]) -> None:
        """Make the first phase fail on all ranks, unless it has ended, because ranks (rank → how) are lost.

        For a process that watches the processes that it needs, without running the operation.
        """
        self._round(0).give_up_on(lost)

    def save_nonce(self) -> str:
        """See `Coordinator.save_nonce`. Does not wait."""
        return self._wire.claim("nonce", secrets.token_hex(8))

    def tickets(self, queues: int) -> Callable[[int], int]:
        """See `Coordinator.tickets`."""
        first = self._queues
        self._queues += queues

        def take(queue: int) -> int:
            with self._ticket_lock:  # one thread at a time may use the connection
                return self._wire.add(f"ticket/{first + queue}") - 1

        return take

    def _exchange(
        self, number: int, phase: str, outcome: Outcome, conclude: Callable[[list[Outcome]], Answer]
    ) -> tuple[Verdict, bytes | None]:
        current = self._phase = self._round(number)
        try:
            verdict, answer = current.run(outcome, conclude)
            if verdict.ok and self.is_coordinator:
                while self._unread:
                    self._wire.delete(self._unread.popleft())
            if verdict.ok and self._peers is not None:
                self._peers.meet(self._peers_store)
        except CoordinatorLostError as error:
            self._lost = True
            raise CoordinatorLostError(f"phase {phase!r}: {error}{self._who_is_gone()}") from error
        finally:
            self._unread.append(current.shared)
        return verdict, answer

    def _check_waited_for(self, number: int, phase: str) -> None:
        if not self._ended and self._wire.has(f"{number}/verdict"):
            raise OperationError(f"phase {phase!r}: the other ranks have given up waiting for rank {self.rank}")

    def _withdraw(self, number: int, failure: Failure) -> None:
        phase = self._phase
        if phase is None or phase.number != number:
            phase = self._round(number)
        try:
            if phase.leave(failure).ok:  # the phase succeeded earlier: the other ranks enter the next one
                self._round(number + 1).leave(failure)
        except CoordinatorLostError:
            self._lost = True

    def _round(self, number: int) -> StoreRound:
        """A series begins at the store, where all leave their cards."""
        if self._relays is not None and number >= self._first_relayed:
            return RelayRound(self._wire, number, self._seat, self._relays, self._peers_store, self._operation)
        return StoreRound(self._wire, number, self._seat, self._peers, self._peers_store)

    def _who_is_gone(self) -> str:
        """Name lost ranks after a short wait, because losses show at different times."""
        if self._peers is None:
            return ""
        end = time.monotonic() + _SEE_SECONDS
        while not self._peers.lost and (left := end - time.monotonic()) > 0:
            self._peers.pause(left)
        return "".join(f"; rank {rank} is gone ({how})" for rank, how in self._peers.lost.items())

    def close(self) -> None:
        """End the operation on this rank without store errors; may wait seconds with `hosts_store`."""
        if self._closed:
            return
        self._closed = True
        if self._relays is not None:
            self._relays.end(self._operation)
        try:
            if not self._lost and self._wire.add("closed") == self.world_size:
                unread = [key for keys in self._unread for key in keys]
                tickets = [f"ticket/{queue}" for queue in range(self._queues)]
                self._wire.delete([*unread, *self._round(self._steps).shared, *tickets, "nonce", "closed"])
            elif not self._lost and self._steps and (self._hosts_store or self.is_coordinator):
                timeout_seconds = _LINGER_AFTER_FAILURE_TIMEOUT_SECONDS if self._ended else _LINGER_TIMEOUT_SECONDS
                self._wire.wait(lambda: not self._wire.has("closed"), time.monotonic() + timeout_seconds)
        except CoordinatorLostError:
            self._lost = True
        finally:
            for store in (self.store, self._peers_store):
                if isinstance(store, TimedStore):
                    store.rest()  # an operation leaves no thread behind
        if self._release is not None and not self._lost:
            self._release()

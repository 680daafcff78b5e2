"""Coordinator over a process group's store: no collectives, concurrent operations, any backend.

An operation, such as a save, is a sequence of phases, for which each rank makes one `StoreCoordinator`.

Keys under the group's prefix: `dcp/drawn/<rank>` counts operations; under `dcp/<sequence>/` are `nonce`, `closed`,
`ticket/<queue>` (number of tickets taken), and for each phase under `<number>/`: `up/<rank>` (outcome of a rank),
`arrived` (number of ranks that have arrived), `ready` (set when all ranks have arrived or one has failed), `verdict`
(result of the phase), `each/<rank>` (return values of `scattered` phases). Each rank deletes the keys that it wrote and
those that it alone reads; the coordinator deletes keys that all ranks have read; the last rank that closes its
coordinator deletes the rest. (Keys of peers: see `roster`.)
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dcp_ranks.errors import ERROR_TYPES, CoordinatorLostError, ErrorTypes
from dcp_ranks.peers.monitor import Peers
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS
from dcp_ranks.phases.outcomes import Failure, Outcome, Step, Verdict
from dcp_ranks.phases.phases import Answer, PhasedCoordinator
from dcp_ranks.phases.store_phase import Seat, StoreRound, shared_keys
from dcp_ranks.phases.tree_phase import RelayRound
from dcp_ranks.transport.chunked_store import KeyValueStore, StoreWire
from dcp_ranks.transport.mailbox import series_number

__all__ = ["StoreCoordinator"]

_LINGER_SECONDS = 5.0
_LINGER_AFTER_FAILURE_SECONDS = 1.0
_SEE_SECONDS = 0.5


class StoreCoordinator(PhasedCoordinator):
    """Coordinator of ranks that communicate through a store. A rank may use several at the same time, in any threads.

    The constructor draws the operation's sequence number, so all ranks must construct their coordinators in the same
    order, before any user code runs. The constructor does not wait for other ranks.

    Args:
        store: Connection to the store; no other coordinator may use it meanwhile (see `borrow_store`).
        rank: Rank of this process within the group.
        world_size: Number of ranks in the group.
        coordinator_rank: Rank within the group that runs each `reduce_fn`.
        sequence: Sequence number of the operation, from an earlier call of `draw`; None to draw one.
        timeout_seconds: Time in seconds that a rank waits for the other ranks in one phase, counted from its own
            arrival.
        hosts_store: Whether this process may be the server of the store, which ends with the process: `close` then
            waits a few seconds at most until every rank has read the result of the last phase.
        release: Function that `close` calls if the connection still works and can be reused.
        peers: Monitor that detects lost ranks and, in large groups, sends the messages; with None, lost ranks are
            detected only at the deadline.
        peers_store: Connection to the store under the prefix with which `peers` was made; None if `store` has it.
        series: Number of the series of operations to which this one belongs, if several series share one monitor; 0 for
            the operations of the process group itself.
        errors: Exception classes that the coordinator raises.

    Example:
        ```python
        import torch.distributed as dist
        from dcp_ranks import StoreCoordinator

        store = dist.HashStore()  # of several processes: a `TCPStore`, one connection for each coordinator
        with StoreCoordinator(store, rank=0, world_size=1) as ranks:
            assert ranks.all_reduce("count samples", lambda: 100, sum) == 100
        ```
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
        errors: ErrorTypes = ERROR_TYPES,
    ) -> None:
        super().__init__(rank, world_size, coordinator_rank, errors=errors)
        self.sequence = self.draw(store, rank, errors) if sequence is None else sequence
        self._wire = StoreWire(store, f"dcp/{self.sequence}/", world_size, errors=errors)
        self._seat = Seat(rank, world_size, coordinator_rank, timeout_seconds)
        self._store = store
        self._peers = peers
        self._peers_store = store if peers_store is None else peers_store
        self._number = series_number(series, self.sequence)
        if peers is not None:
            peers.begin(self._number)
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
    def draw(store: KeyValueStore, rank: int, errors: ErrorTypes = ERROR_TYPES) -> int:
        """Return the sequence number of this rank's next operation, and count it in the store.

        A rank that draws a number must run that operation: the other ranks wait for this rank in it.
        """
        return StoreWire(store, "dcp/", 1, errors=errors).add(f"drawn/{rank}")

    @property
    def store(self) -> Any:
        """Connection to the store of the process group; see `Coordinator.store`."""
        return self._store

    def lost_ranks(self) -> Mapping[int, str]:
        """Return the ranks of which this one knows that they are lost; see `Coordinator.lost_ranks`."""
        if self._peers is None:
            return {}
        self._peers.pause(0.0)
        return self._peers.lost

    def give_up_on(self, lost: Mapping[int, str]) -> None:
        """Make the first phase fail on all ranks, because ranks are lost; no effect if that phase has ended.

        For a process that does not run the operation itself, but watches the processes without which it cannot begin.

        Args:
            lost: Lost rank → description of its loss.
        """
        self._round(Step(0, "", "")).give_up_on(lost)

    def save_nonce(self) -> str:
        """Return a random string, equal on all ranks; see `Coordinator.save_nonce`. Does not wait for other ranks."""
        return self._wire.claim("nonce", secrets.token_hex(8))

    def tickets(self, queues: int) -> Callable[[int], int]:
        """Return a function that takes the next ticket of a queue; see `Coordinator.tickets`."""
        first = self._queues
        self._queues += queues

        def take(queue: int) -> int:
            with self._ticket_lock:  # one thread at a time may use the connection
                return self._wire.add(f"ticket/{first + queue}") - 1

        return take

    def _exchange(
        self, step: Step, outcome: Outcome, conclude: Callable[[list[Outcome]], Answer]
    ) -> tuple[Verdict, bytes | None]:
        phase = self._phase = self._round(step)
        try:
            verdict, answer = phase.run(outcome, conclude)
            if verdict.ok and self.is_coordinator:
                while self._unread:
                    self._wire.delete(self._unread.popleft())
            if verdict.ok and self._peers is not None:
                self._peers.meet(self._peers_store)
        except CoordinatorLostError as error:
            self._lost = True
            raise self.errors.coordinator_lost(f"phase {step.phase!r}: {error}{self._who_is_gone()}") from error
        finally:
            self._unread.append(phase.shared)
        return verdict, answer

    def _check_waited_for(self, step: Step) -> None:
        if self._wire.has(f"{step.number}/verdict"):
            raise self.errors.operation(
                f"phase {step.phase!r}: the other ranks have given up waiting for rank {self.rank}"
            )

    def _withdraw(self, number: int, failure: Failure) -> None:
        phase = self._phase
        if phase is None or phase.number != number:
            phase = self._round(Step(number, "", ""))
        try:
            if phase.leave(failure).ok:  # it had gone well before: the other ranks are on their way into the next one
                self._round(Step(number + 1, "", "")).leave(failure)
        except CoordinatorLostError:
            self._lost = True

    def _round(self, step: Step) -> StoreRound:
        """Return the phase to run: the first one over the store (at its end all ranks have left their cards)."""
        if self._peers is not None and self._peers.relays and step.number > 0:
            return RelayRound(self._wire, step, self._seat, self._peers, self._number)
        return StoreRound(self._wire, step, self._seat, self._peers, self._peers_store)

    def _who_is_gone(self) -> str:
        """Return the peers' evidence of lost ranks (ends of processes and connections show at different times)."""
        if self._peers is None:
            return ""
        end = time.monotonic() + _SEE_SECONDS
        while not self._peers.lost and (left := end - time.monotonic()) > 0:
            self._peers.pause(left)
        return "".join(f"; rank {rank} is gone ({how})" for rank, how in self._peers.lost.items())

    def close(self) -> None:
        """End the operation on this rank; see `Coordinator.close`.

        Errors of the store are not raised. If `hosts_store` is set, `close` may wait for a few seconds.
        """
        if self._closed:
            return
        self._closed = True
        if self._peers is not None:
            self._peers.end(self._number)
        if self._lost:
            return
        try:
            self._close()
        except CoordinatorLostError:
            return
        if self._release is not None:
            self._release()

    def _close(self) -> None:
        if self._wire.add("closed") == self.world_size:
            unread = [key for keys in self._unread for key in keys]
            tickets = [f"ticket/{queue}" for queue in range(self._queues)]
            self._wire.delete([*unread, *shared_keys(self._steps), *tickets, "nonce", "closed"])
        elif self._steps and (self._hosts_store or self.is_coordinator):
            patience_seconds = _LINGER_AFTER_FAILURE_SECONDS if self._ended else _LINGER_SECONDS
            self._wire.wait(lambda: not self._wire.has("closed"), time.monotonic() + patience_seconds)

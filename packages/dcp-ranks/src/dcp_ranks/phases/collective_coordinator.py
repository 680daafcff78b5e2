"""Coordinator over object collectives, for process groups with an unusable store.

Collectives are matched by their order, so a group's operations run one after the other, in a group apart from the
trainer's collectives.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dcp_ranks.errors import CoordinatorLostError, CoordinatorTimeoutError
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS
from dcp_ranks.phases.phases import Answer, Failure, Outcome, PhasedCoordinator, Verdict
from dcp_ranks.transport.store_wire import decode, encode


class _Turns:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._drawn = 0
        self._ended: set[int] = set()
        self._next = 1

    def draw(self) -> int:
        with self._changed:
            self._drawn += 1
            return self._drawn

    def wait(self, number: int, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._next == number, seconds)

    def end(self, number: int) -> None:
        with self._changed:
            self._ended.add(number)
            while self._next in self._ended:
                self._ended.remove(self._next)
                self._next += 1
            self._changed.notify_all()


_turns: weakref.WeakKeyDictionary[dist.ProcessGroup, _Turns] = weakref.WeakKeyDictionary()
_turns_lock = threading.Lock()


_own_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group of the same ranks for our operations alone; its first call is collective.

    Fake groups and groups without a store, such as MPI, are returned unchanged.
    """
    if dist.get_backend(group) == "fake" or distributed_c10d._get_process_group_store(group) is None:  # noqa: SLF001 - old torch too
        return group
    with _turns_lock:
        if group not in _own_groups:
            members = dist.get_process_group_ranks(group)
            _own_groups[group] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        return _own_groups[group]


class CollectiveCoordinator(PhasedCoordinator):
    """Coordinator of ranks that communicate by object collectives of a process group.

    The group's next operation waits for `close`, at most `timeout_seconds`. Only the group's timeout detects a missing
    rank, and its error names no rank. While an operation runs in another thread, the trainer must not use the same
    group.
    """

    _sends_own_value = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        coordinator_rank: int = 0,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), coordinator_rank)
        with _turns_lock:
            self._turns = _turns.setdefault(group, _Turns())
        self.sequence = self._turns.draw()
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._source = dist.get_global_rank(group, coordinator_rank)
        self._nonce: str | None = None
        self._closed = False

    def save_nonce(self) -> str:
        """See `Coordinator.save_nonce`. The first call is a phase, so every rank must call it."""
        if self._nonce is None:
            self._nonce = self.broadcast("save nonce", lambda: secrets.token_hex(8))
        return self._nonce

    def _exchange(
        self, number: int, phase: str, outcome: Outcome, conclude: Callable[[list[Outcome]], Answer]
    ) -> tuple[Verdict, bytes | None]:
        del number  # collectives come in order
        if not self._turns.wait(self.sequence, self._timeout_seconds):
            raise CoordinatorTimeoutError(phase, (self.rank,), self._timeout_seconds)
        try:
            return self._gather_and_tell(outcome, conclude)
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise CoordinatorLostError(
                f"phase {phase!r}: the process group over which the ranks coordinate failed ({text}); a rank has "
                "most likely ended or stayed away"
            ) from error

    def _gather_and_tell(
        self, outcome: Outcome, conclude: Callable[[list[Outcome]], Answer]
    ) -> tuple[Verdict, bytes | None]:
        gathered: list[Any] | None = [None] * self.world_size if self.is_coordinator else None
        dist.gather_object(encode((self.sequence, outcome)), gathered, dst=self._source, group=self._group)
        answer = conclude(_of_one_operation([decode(data) for data in gathered])) if gathered is not None else None
        verdicts = [None if answer is None else encode(answer.verdict)]
        dist.broadcast_object_list(verdicts, src=self._source, group=self._group)
        verdict: Verdict = answer.verdict if answer is not None else decode(verdicts[0] or b"")
        if not verdict.scattered:
            return verdict, None
        own: list[Any] = [None]
        each = None if answer is None else list(answer.each)
        dist.scatter_object_list(own, each, src=self._source, group=self._group)
        return verdict, own[0]

    def _withdraw(self, number: int, failure: Failure) -> None:
        """Do nothing: a collective to notify other ranks might wait forever."""

    def close(self) -> None:
        """End the operation on this rank."""
        if not self._closed:
            self._closed = True
            self._turns.end(self.sequence)


def _of_one_operation(sent: list[tuple[int, Outcome]]) -> list[Outcome]:
    """Relabel the outcomes if a rank that failed alone is already in a later operation."""
    if len({sequence for sequence, _ in sent}) == 1:
        return [outcome for _, outcome in sent]
    return [replace(outcome, label=f"{outcome.label} of operation {sequence}") for sequence, outcome in sent]

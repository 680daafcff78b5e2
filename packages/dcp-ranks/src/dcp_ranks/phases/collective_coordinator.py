"""Coordinator over object collectives, for process groups whose store cannot be used. Phases are defined in `phases`.

An operation, such as a save, is a sequence of phases with one coordinator on each rank. The deadline of a phase is the
timeout of the group (`init_process_group(timeout=...)`). Collectives of one group are matched by their order, so
operations run one at a time: an operation waits on every rank until all earlier operations have ended.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dcp_ranks.errors import ERROR_TYPES, ErrorTypes
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS
from dcp_ranks.phases.outcomes import Failure, Outcome, Step, Verdict
from dcp_ranks.phases.phases import Answer, PhasedCoordinator
from dcp_ranks.transport.pickled import decode, encode

__all__ = ["CollectiveCoordinator"]


class _Turns:
    """Queue of operations on one group: they run one after the other, in the order in which they were started."""

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


class CollectiveCoordinator(PhasedCoordinator):
    """Coordinator of ranks that communicate by object collectives of a process group.

    Close it after the operation: the group's next operation waits for `close`. A missing rank is detected only by the
    group's own timeout, whose error names no rank. While an operation runs in another thread, the trainer must not use
    the same group.

    Args:
        group: Process group of the ranks.
        coordinator_rank: Rank within the group that runs each `reduce_fn`.
        timeout_seconds: Time in seconds that an operation waits for this rank's earlier operations on the group.
        errors: Exception classes that the coordinator raises.

    Example:
        ```python
        import torch.distributed as dist
        from dcp_ranks import CollectiveCoordinator

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with CollectiveCoordinator(dist.group.WORLD) as ranks:
            assert ranks.all_reduce("count samples", lambda: 100, sum) == 100
        dist.destroy_process_group()
        ```
    """

    _sends_own_value = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        coordinator_rank: int = 0,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        errors: ErrorTypes = ERROR_TYPES,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), coordinator_rank, errors=errors)
        with _turns_lock:
            self._turns = _turns.setdefault(group, _Turns())
        self.sequence = self._turns.draw()
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._source = dist.get_global_rank(group, coordinator_rank)
        self._nonce: str | None = None
        self._closed = False

    def save_nonce(self) -> str:
        """Return a random string, equal on all ranks; see `Coordinator.save_nonce`.

        Ranks: every rank must call it; the first call is a phase of its own.
        """
        if self._nonce is None:
            self._nonce = self.broadcast("save nonce", lambda: secrets.token_hex(8))
        return self._nonce

    def _exchange(
        self, step: Step, outcome: Outcome, conclude: Callable[[list[Outcome]], Answer]
    ) -> tuple[Verdict, bytes | None]:
        if not self._turns.wait(self.sequence, self._timeout_seconds):
            raise self.errors.coordinator_timeout(step.phase, (self.rank,), self._timeout_seconds)
        try:
            return self._gather_and_tell(outcome, conclude)
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise self.errors.coordinator_lost(
                f"phase {step.phase!r}: the process group over which the ranks coordinate failed ({text}); a rank has "
                "most likely ended or stayed away"
            ) from error

    def _gather_and_tell(
        self, outcome: Outcome, conclude: Callable[[list[Outcome]], Answer]
    ) -> tuple[Verdict, bytes | None]:
        gathered: list[Any] | None = [None] * self.world_size if self.is_coordinator else None
        dist.gather_object(encode(outcome), gathered, dst=self._source, group=self._group)
        answer = conclude([decode(data) for data in gathered]) if gathered is not None else None
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
        """Do nothing: telling other ranks needs a collective, which would wait for every rank, and may wait forever."""

    def close(self) -> None:
        """End the operation on this rank; see `Coordinator.close`."""
        if not self._closed:
            self._closed = True
            self._turns.end(self.sequence)

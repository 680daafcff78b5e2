"""`Alert`: a rank's reason to save, such as a signal, which the other ranks learn in the background.

The calls of `maybe_save` are numbered, the same on all ranks. While no rank has a reason, a call exchanges nothing: a
thread per rank polls one key of the store. Then:

1. A rank with a reason sets the key `raised`.
2. Each rank that sees it answers with the number of its calls so far, and makes no call before it knows the target.
3. The rank that answers last sets the target: the highest answer plus 1. So no rank has passed the target.
4. All ranks go on to the target, and exchange their reasons in that call.

The threads answer, so a rank that waits in a collective of the training delays no other rank. A rank that ends its
manager answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from weakref import WeakMethod

from dcp_core.errors import CoordinatorLostError, CoordinatorTimeoutError, PeerLostError
from dcp_manager.together import Ranks
from dcp_ranks import Coordinator
from dcp_ranks.phases.collective_coordinator import CollectiveCoordinator
from dcp_ranks.transport.store_wire import StoreWire

_PHASE = "agree on the step of a save"
# Limits of the polling: by all ranks together, and by one rank.
_POLLS_PER_SECOND, _LEAST_POLL_SECONDS = 1000, 0.2
_JOIN_TIMEOUT_SECONDS = 2.0


class Alert:
    """Watch for reasons to save on all ranks; `has_reason` is held weakly, and called in another thread."""

    def __init__(self, ranks: Ranks, has_reason: Callable[[], bool]) -> None:
        self._ranks = ranks
        self._has_reason = WeakMethod(has_reason)
        self._round: _Round | None = None
        self._may_watch = True

    def exchanges(self, *, reason: bool, timeout_seconds: float) -> bool:
        """Count a call of `maybe_save`; return whether ranks exchange their reasons in it, the same on all ranks.

        `timeout_seconds` limits the wait for other ranks' answers; if ranks fail to agree, a `RanksError` is raised.
        Without `watch` before it, each call is an exchange.
        """
        if self._round is not None and not self._round.reaches_target(reason=reason, timeout_seconds=timeout_seconds):
            return False
        self._round = None
        return True

    def watch(self) -> None:
        """Begin to watch after an exchange. Without a store, do nothing.

        Ranks: every rank, in the thread that saves; does not wait.
        """
        if not self._may_watch or self._ranks.alone:
            return
        them = self._ranks.coordinator()
        self._may_watch = not isinstance(them, CollectiveCoordinator)
        if self._may_watch:
            self._round = _Round(them, self._has_reason)
        else:
            them.close()

    def close(self) -> None:
        """End the watch on this rank."""
        if self._round is not None:
            self._round.leave()
            self._round = None


class _Round:
    def __init__(self, them: Coordinator, has_reason: WeakMethod[Callable[[], bool]]) -> None:
        self._them = them
        self._has_reason = has_reason
        self._wire = StoreWire(them.store, f"dcp/alert/{them.sequence}/", them.world_size)
        self._changed = threading.Condition()
        self._calls = 0
        self._answer: int | None = None
        self._target: int | None = None
        self._give_up_at: float | None = None
        self._left = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dcp-alert", daemon=True)
        self._thread.start()

    def reaches_target(self, *, reason: bool, timeout_seconds: float) -> bool:
        with self._changed:
            if (reason or self._answer is not None or self._error is not None) and self._target is None:
                self._wait_for_target(timeout_seconds)
            self._calls += 1
            return self._calls == self._target

    def _wait_for_target(self, timeout_seconds: float) -> None:
        if self._answer is None:
            self._answer = self._calls
        self._give_up_at = time.monotonic() + timeout_seconds
        self._changed.notify_all()
        # The thread gives up in time, unless a request to the store hangs.
        limit = min(timeout_seconds + _JOIN_TIMEOUT_SECONDS, threading.TIMEOUT_MAX)
        self._changed.wait_for(lambda: self._target is not None or self._error is not None, limit)
        if self._error is not None:
            raise self._error
        if self._target is None:
            raise CoordinatorLostError(f"phase {_PHASE!r}: the store has not answered for {timeout_seconds:.1f} s")

    def leave(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()
        self._thread.join(_JOIN_TIMEOUT_SECONDS)

    def _run(self) -> None:
        try:
            with self._them:
                self._take_part()
        except BaseException as error:  # noqa: BLE001 - the next call raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take_part(self) -> None:
        is_raised = self._wait_for_reason()
        self._send_answer()
        if is_raised:
            target = self._read_target()
            with self._changed:
                self._target = target
                self._changed.notify_all()
        if self._wire.add("left") == self._them.world_size:
            self._wire.delete(["raised", "answers", "target", "left"])

    def _wait_for_reason(self) -> bool:
        pause = max(_LEAST_POLL_SECONDS, self._them.world_size / _POLLS_PER_SECOND)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._left or self._answer is not None, pause)
                if self._left:
                    return False
                has_reason = self._answer is not None
            own = self._has_reason()
            if own is None:  # the manager was dropped without `close`
                return False
            if has_reason or own():
                self._wire.put("raised", b"")
                return True
            del own
            if self._wire.has("raised"):
                return True

    def _send_answer(self) -> None:
        with self._changed:
            if self._answer is None:
                self._answer = self._calls
        world = range(self._them.world_size)
        self._wire.put(f"answer/{self._them.rank}", str(self._answer).encode())
        if self._wire.add("answers") == len(world):
            answers = [f"answer/{rank}" for rank in world]
            self._wire.put("target", str(max(int(self._wire.get(answer)[0]) for answer in answers) + 1).encode())
            self._wire.delete(answers)

    def _read_target(self) -> int | None:
        start = time.monotonic()

        def is_over() -> bool:
            late = self._give_up_at is not None and time.monotonic() > self._give_up_at
            return late or self._left or self._wire.has("target") or bool(self._lost())

        self._wire.wait(is_over, float("inf"))
        if self._wire.has("target"):
            return int(self._wire.get("target")[0])
        if self._left:
            return None
        lost = self._lost()
        if lost:
            raise PeerLostError(_PHASE, [*lost], [*lost.values()])
        missing = [rank for rank in range(self._them.world_size) if not self._wire.has(f"answer/{rank}")]
        raise CoordinatorTimeoutError(_PHASE, missing, time.monotonic() - start)

    def _lost(self) -> dict[int, str]:
        lost = self._them.lost_ranks()
        return {rank: how for rank, how in lost.items() if not self._wire.has(f"answer/{rank}")}

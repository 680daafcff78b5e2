"""One phase through a store: each rank writes its outcome, then waits for the verdict (the result of the phase).

Any rank may set the verdict, and the first one set is final: normally the coordinator sets it, otherwise a rank that
reaches its deadline or detects a lost rank. Verdicts are defined in `outcomes`, operations in `store_coordinator`.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dcp_ranks.peers.monitor import Peers
from dcp_ranks.phases.outcomes import Failure, Outcome, Step, Verdict, shorten
from dcp_ranks.phases.phases import Answer
from dcp_ranks.transport.chunked_store import KeyValueStore, StoreWire, VanishedKeyError
from dcp_ranks.transport.pickled import decode, encode

__all__ = ["GRACE_SECONDS", "MARGIN_SECONDS", "Seat", "StoreRound", "shared_keys"]

# A failed phase ends this long after its first failure, with the outcomes that have arrived by then.
GRACE_SECONDS = 1.0
# A rank that follows gives up after the coordinator would have, so that normally one rank speaks for all.
MARGIN_SECONDS = 1.0

# Before all ranks have met, a rank that waits this long looks for those that have come, and may have died since.
_SEARCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Seat:
    """Place of one rank in an operation: its rank, the world size, the coordinator rank, and its timeout in seconds."""

    rank: int
    world_size: int
    coordinator_rank: int
    timeout_seconds: float


def shared_keys(number: int) -> list[str]:
    """Return the store keys `arrived`, `ready` and `verdict` of the phase with this number, which all ranks use."""
    return [f"{number}/{name}" for name in ("arrived", "ready", "verdict")]


class StoreRound:
    """Run of one phase on one rank, through a store.

    Attributes:
        INLINE_BYTES: Largest size in bytes of a verdict that is stored in the key `verdict` itself; larger verdicts are
            stored under further keys.

    Args:
        wire: Access to the store's keys of the operation.
        step: Phase to run.
        seat: Rank, world size, coordinator rank and timeout of this rank.
        peers: Monitor that detects lost ranks; with None, lost ranks are detected only at the deadline.
        peers_store: Connection to the store in which the monitor may look for ranks before it has met them all; None
            after that.
    """

    INLINE_BYTES = 48 << 10

    def __init__(
        self,
        wire: StoreWire,
        step: Step,
        seat: Seat,
        peers: Peers | None = None,
        peers_store: KeyValueStore | None = None,
    ) -> None:
        self._peers = peers
        self._peers_store = peers_store
        self._wire = wire
        self._seat = seat
        self._started = time.monotonic()
        self.number = step.number
        self._at = f"{step.number}/"
        self._arrived, self._ready, self._verdict = shared_keys(step.number)
        self.shared = shared_keys(step.number)
        """Store keys to delete when every rank has read the verdict."""
        self._own_keys: list[str] = []
        self._next_search = self._started + _SEARCH_SECONDS

    def run(self, outcome: Outcome, conclude: Callable[[list[Outcome]], Answer]) -> tuple[Verdict, bytes | None]:
        """Run the phase: send this rank's outcome, and return the verdict.

        Args:
            outcome: Outcome of this rank.
            conclude: Function that decides the verdict; called once, on the coordinator, with every rank's outcome in
                rank order.

        Returns:
            The verdict, and this rank's own pickled return value if the verdict is `scattered` and this rank is not the
            coordinator; otherwise None.

        Ranks: every rank; collective.
        """
        if self._wire.has(self._verdict):  # others have given up on this rank
            return self._read(), None
        self._own_keys = self._arrive(outcome)
        if self._leads:
            verdict, answer = self._lead(outcome, conclude), None
        else:
            verdict = self._follow(outcome)
            answer = self._fetch(self._seat.rank) if verdict.scattered else None
        self._wire.delete(self._own_keys)
        return verdict, answer

    def leave(self, failure: Failure) -> Verdict:
        """Make the phase fail on all ranks unless it has ended; returns its final verdict. Does not wait for ranks."""
        verdict = self._declare(Verdict(failures=(failure,)))
        self._wire.delete(self._own_keys)
        return verdict

    def give_up_on(self, lost: Mapping[int, str]) -> None:
        """Make the phase fail on all ranks for the loss of some, unless it has ended. Does not wait for ranks."""
        self._declare(Verdict(lost=tuple(sorted(lost.items()))))
        self._wire.mark(self._ready)  # the rank that leads may be another process than this one

    def _declare(self, verdict: Verdict) -> Verdict:
        """Declare the verdict of the phase, unless another rank has; returns the verdict that was declared first."""
        text, keys = self._text(verdict)
        winner = self._wire.claim(self._verdict, text)
        if not self._leads:
            self._wire.mark(self._ready)
        if winner == text:
            self.shared += keys
            return verdict
        self._wire.delete(keys)
        return self._open(winner)

    def _text(self, verdict: Verdict) -> tuple[str, list[str]]:
        """Return a verdict as text for the key `verdict`, and the further keys that hold a large verdict."""
        data = encode(verdict)
        if len(data) <= self.INLINE_BYTES:
            return "i" + base64.b64encode(data).decode(), []
        return f"k{self._seat.rank}", self._wire.put(f"{self._at}told/{self._seat.rank}", data)

    @property
    def _leads(self) -> bool:
        return self._seat.rank == self._seat.coordinator_rank

    def _up(self, rank: int) -> str:
        return f"{self._at}up/{rank}"

    def _arrive(self, outcome: Outcome) -> list[str]:
        keys = self._wire.put(self._up(self._seat.rank), b"" if self._leads else encode(outcome))
        everybody = self._wire.add(self._arrived) == self._seat.world_size
        if everybody or outcome.failure is not None:
            self._wire.mark(self._ready)
        return keys

    def _lead(self, own: Outcome, conclude: Callable[[list[Outcome]], Answer]) -> Verdict:
        deadline = self._started + self._seat.timeout_seconds
        ups = [self._up(rank) for rank in range(self._seat.world_size)]
        complete = False
        if self._wait(self._ready, deadline):
            if self._wire.has(self._verdict):
                return self._read()
            grace = min(deadline, time.monotonic() + GRACE_SECONDS)
            complete = self._wire.wait(lambda: self._wire.has(*ups), grace)
        outcomes = self._outcomes(own, complete=complete)
        if self._wire.has(self._verdict):  # a rank did not want to wait any longer, and has removed its report
            return self._read()
        whole = [outcome for outcome in outcomes if outcome is not None]
        if len(whole) < len(outcomes):
            return self._declare(self._partial(outcomes))
        answer = conclude(whole)
        return self._publish(answer)

    def _publish(self, answer: Answer) -> Verdict:
        keys = []
        if answer.verdict.scattered:
            for rank, data in enumerate(answer.each):
                if rank != self._seat.rank:
                    keys += self._wire.put(f"{self._at}each/{rank}", data)
        verdict = self._declare(answer.verdict)
        if verdict is not answer.verdict:
            self._wire.delete(keys)
        return verdict

    def _follow(self, own: Outcome) -> Verdict:
        if self._wait(self._verdict, self._started + self._patience(own)):
            return self._read()
        return self._declare(self._partial(self._outcomes(own)))

    def _patience(self, own: Outcome) -> float:
        return 2 * GRACE_SECONDS if own.failure is not None else self._seat.timeout_seconds + MARGIN_SECONDS

    def _wait(self, key: str, deadline: float) -> bool:
        """Whether this key was set before the deadline, and before a rank was found to be lost."""
        if self._peers is None:
            return self._wire.wait(lambda: self._wire.has(key), deadline)
        peers = self._peers
        found = self._wire.wait(lambda: bool(peers.lost) or self._wire.has(key), deadline, self._pause)
        # A lost rank may have been the last one to arrive: look for the key once more.
        return self._wire.has(key) if peers.lost else found

    def _pause(self, seconds: float) -> None:
        if self._peers is not None:
            self._peers.pause(seconds)
            if self._peers_store is not None and time.monotonic() > self._next_search:
                self._next_search = time.monotonic() + _SEARCH_SECONDS
                self._peers.look_around(self._peers_store)

    def _outcomes(self, own: Outcome, *, complete: bool = False) -> list[Outcome | None]:
        """Return the outcome of each rank; None for those that have not arrived."""
        outcomes: list[Outcome | None] = []
        for rank in range(self._seat.world_size):
            if rank == self._seat.rank:
                outcomes.append(own)
            elif complete or self._wire.has(self._up(rank)):
                outcomes.append(self._outcome(rank))
            else:
                outcomes.append(None)
        return outcomes

    def _outcome(self, rank: int) -> Outcome | None:
        try:
            data, _ = self._wire.get(self._up(rank))
        except VanishedKeyError:  # that rank has read a verdict
            return None
        outcome = decode(data) if data else Outcome("")
        return outcome if isinstance(outcome, Outcome) else None

    def _partial(self, outcomes: list[Outcome | None]) -> Verdict:
        """Return the verdict that a rank declares when it stops waiting."""
        failures = [outcome.failure for outcome in outcomes if outcome is not None and outcome.failure is not None]
        absent = tuple(rank for rank, outcome in enumerate(outcomes) if outcome is None)
        lost = () if self._peers is None else tuple(sorted(self._peers.lost.items()))
        if failures:
            return Verdict(failures=shorten(failures), unheard=() if lost else absent, lost=lost)
        if lost:
            return Verdict(lost=lost)
        waited_seconds = time.monotonic() - self._started
        return Verdict(missing=absent or (self._seat.coordinator_rank,), waited_seconds=waited_seconds)

    def _read(self) -> Verdict:
        return self._open(self._wire.get_text(self._verdict))

    def _open(self, text: str) -> Verdict:
        if text[:1] == "i":
            data = base64.b64decode(text[1:])
        else:
            data, keys = self._wire.get(f"{self._at}told/{text[1:]}")
            self.shared += keys
        verdict: Verdict = decode(data)
        return verdict

    def _fetch(self, rank: int) -> bytes:
        """Return the coordinator's answer to a rank, and remove it from the store."""
        data, keys = self._wire.get(f"{self._at}each/{rank}")
        self._wire.delete(keys)
        return data

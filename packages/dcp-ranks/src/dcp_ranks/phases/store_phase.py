"""One phase through a store: each rank writes its outcome, then waits for the verdict.

The first verdict is final: the coordinator's, or that of a rank that reaches its deadline or detects a lost rank.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from dcp_ranks.peers.monitor import Peers
from dcp_ranks.phases.phases import Answer, Failure, Outcome, Verdict, shorten
from dcp_ranks.transport.store_wire import KeyValueStore, StoreWire, decode, encode

__all__ = ["GRACE_SECONDS", "MARGIN_SECONDS", "Seat", "StoreRound"]

# A failed phase ends this long after its first failure, with the outcomes that have arrived by then.
GRACE_SECONDS = 1.0
# Other ranks wait longer than the coordinator, so that normally the coordinator sets the verdict.
MARGIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place in an operation."""

    rank: int
    world_size: int
    coordinator_rank: int
    timeout_seconds: float


class StoreRound:
    """One phase on one rank. With `peers` None, lost ranks are detected only at the deadline.

    `peers_store` is None once `peers` has met all ranks.
    """

    INLINE_BYTES = 48 << 10

    def __init__(
        self,
        wire: StoreWire,
        number: int,
        seat: Seat,
        peers: Peers | None = None,
        peers_store: KeyValueStore | None = None,
    ) -> None:
        self._peers = peers
        self._peers_store = peers_store
        self._wire = wire
        self._seat = seat
        self._started = time.monotonic()
        self._leads = seat.rank == seat.coordinator_rank
        self.number = number
        self._at = f"{number}/"
        self._up = f"{number}/up/"
        self.shared = [f"{number}/{name}" for name in ("arrived", "ready", "verdict")]
        """Keys that all ranks read."""
        self._arrived, self._ready, self._verdict = self.shared
        self._own_keys: list[str] = []

    def run(self, outcome: Outcome, conclude: Callable[[list[Outcome]], Answer]) -> tuple[Verdict, bytes | None]:
        """Send this rank's outcome; return as `PhasedCoordinator._exchange` does. Collective."""
        if self._wire.has(self._verdict):  # others have given up on this rank
            return self._read(), None
        self._own_keys = self._wire.put(f"{self._up}{self._seat.rank}", encode(outcome))
        everybody = self._wire.add(self._arrived) == self._seat.world_size
        if everybody or outcome.failure is not None:
            self._wire.put(self._ready, b"")
        if self._leads:
            verdict, answer = self._lead(outcome, conclude), None
        else:
            verdict = self._follow(outcome)
            answer = self._fetch(self._seat.rank) if verdict.scattered else None
        self._wire.delete(self._own_keys)
        return verdict, answer

    def leave(self, failure: Failure) -> Verdict:
        """Make the phase fail on all ranks unless it has ended; return its verdict. Does not wait."""
        verdict = self._declare(Verdict(failures=(failure,)))
        self._wire.delete(self._own_keys)
        return verdict

    def give_up_on(self, lost: Mapping[int, str]) -> None:
        """Make the phase fail because ranks are lost, unless it has ended. Does not wait."""
        self._declare(Verdict(lost=tuple(sorted(lost.items()))))
        self._wire.put(self._ready, b"")  # the rank that leads may be another process than this one

    def _declare(self, verdict: Verdict) -> Verdict:
        text, keys = self._text(verdict)
        winner = self._wire.claim(self._verdict, text)
        if not self._leads:
            self._wire.put(self._ready, b"")
        if winner == text:
            self.shared += keys
            return verdict
        self._wire.delete(keys)
        return self._open(winner)

    def _text(self, verdict: Verdict) -> tuple[str, list[str]]:
        data = encode(verdict)
        if len(data) <= self.INLINE_BYTES:
            return "i" + base64.b64encode(data).decode(), []
        return f"k{self._seat.rank}", self._wire.put(f"{self._at}told/{self._seat.rank}", data)

    def _lead(self, own: Outcome, conclude: Callable[[list[Outcome]], Answer]) -> Verdict:
        deadline = self._started + self._seat.timeout_seconds
        ups = [f"{self._up}{rank}" for rank in range(self._seat.world_size)]
        complete = False
        if self._wait(self._ready, deadline):
            if self._wire.has(self._verdict):
                return self._read()
            grace = min(deadline, time.monotonic() + GRACE_SECONDS)
            complete = self._wire.wait(partial(self._wire.has, *ups), grace)
        outcomes = self._outcomes(own, complete=complete)
        if self._wire.has(self._verdict):  # a rank has stopped waiting, and deleted its outcome
            return self._read()
        whole = [outcome for outcome in outcomes if outcome is not None]
        if len(whole) < len(outcomes):
            return self._declare(self._partial(outcomes))
        answer = conclude(whole)
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
        peers = self._peers
        if peers is None:
            return self._wire.wait(partial(self._wire.has, key), deadline)
        pause = partial(peers.pause, store=self._peers_store)
        found = self._wire.wait(lambda: bool(peers.lost) or self._wire.has(key), deadline, pause)
        # A lost rank may have been the last one to arrive: look for the key once more.
        return self._wire.has(key) if peers.lost else found

    def _outcomes(self, own: Outcome, *, complete: bool = False) -> list[Outcome | None]:
        outcomes: list[Outcome | None] = []
        for rank in range(self._seat.world_size):
            if rank == self._seat.rank:
                outcomes.append(own)
                continue
            up = f"{self._up}{rank}"
            # A key that is gone again is of a rank that has read a verdict.
            found = self._wire.find(up) if complete or self._wire.has(up) else None
            outcomes.append(None if found is None else decode(found[0]))
        return outcomes

    def _partial(self, outcomes: list[Outcome | None]) -> Verdict:
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
        data, keys = self._wire.get(f"{self._at}each/{rank}")
        self._wire.delete(keys)
        return data

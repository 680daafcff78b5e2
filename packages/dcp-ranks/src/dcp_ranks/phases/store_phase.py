"""One phase through a store: each rank writes its outcome, then waits for the verdict.

The first verdict is final: the coordinator's, or that of a rank that reaches its deadline or detects a lost rank.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from dcp_base.logs import library_logger
from dcp_ranks.errors import format_ranks
from dcp_ranks.peers.monitor import Peers
from dcp_ranks.phases.phases import Answer, Failure, Outcome, Verdict, shorten
from dcp_ranks.transport.store_wire import KeyValueStore, StoreWire, decode, encode

# A failed phase ends this long after its first failure, with the outcomes that have arrived by then.
GRACE_SECONDS = 1.0
# Other ranks wait longer than the coordinator, so that normally the coordinator sets the verdict.
MARGIN_SECONDS = 1.0
_FIRST_LINE_SECONDS = 30.0
_COUNT_SECONDS = 1.0
_COUNTS_PER_SECOND = 1024  # of all ranks together
_MAX_HOST_NAMES = 64

_log = library_logger(__name__)


@dataclass(slots=True)
class Waiting:
    """One rank's wait for others: `timeout_seconds` for half of them to arrive, and as long again from then.

    Logs `report()`, unless empty, after 30 s, one minute, two minutes, …
    """

    phase: str
    world_size: int
    timeout_seconds: float
    arrived: Callable[[], int]
    report: Callable[[], str]
    started: float
    due: float
    """When to call `over`."""
    _since: float = field(init=False, default=-math.inf)
    half: bool = field(init=False, default=False)
    """Whether half of the ranks have arrived."""
    _lines: int = field(init=False, default=0)

    def over(self) -> bool:
        """Return whether the wait ends now."""
        now = time.monotonic()
        if now < self.due:
            return False
        if not self.half:
            self.half = 2 * self.arrived() >= self.world_size
            self._since = self._since if self.half else now
        if now >= self._next_line:
            if missing := self.report():
                _log.warning("phase %s: waiting for %s; %d s so far", self.phase, missing, now - self.started)
            while now >= self._next_line:
                self._lines += 1
        if self.half:
            end = max(self.started, self._since) + self.timeout_seconds
            self.due = min(end, self._next_line)
        else:
            end = self.started + 2 * self.timeout_seconds
            self.due = min(end, self._next_line, now + max(_COUNT_SECONDS, self.world_size / _COUNTS_PER_SECOND))
        return now >= end

    @property
    def _next_line(self) -> float:
        return self.started + float(_FIRST_LINE_SECONDS * 2**self._lines)

    def limit(self, seconds: float) -> None:
        """Wait at most for `seconds` from the start, whoever arrives."""
        self.half, self.timeout_seconds = True, min(seconds, self.timeout_seconds)
        self.due = min(self.due, self.started + seconds)


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
        self._started = now = time.monotonic()
        self._leads = seat.rank == seat.coordinator_rank
        seconds = seat.timeout_seconds + (0.0 if self._leads else MARGIN_SECONDS)
        due = now + min(_COUNT_SECONDS, seconds)
        self._waiting = Waiting("", seat.world_size, seconds, self._count, self._report, now, due)
        self._place = 0
        """Number of ranks that had arrived with this one."""
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
        self._place = self._wire.add(self._arrived)
        self._waiting.phase = outcome.label.partition(" ")[2]
        if 2 * self._place >= self._seat.world_size:
            self._waiting.half = True
            self._waiting.due = self._started + min(_FIRST_LINE_SECONDS, self._waiting.timeout_seconds)
        if self._place == self._seat.world_size or outcome.failure is not None:
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
        if named := [*verdict.missing, *dict(verdict.lost)]:
            verdict = replace(verdict, hosts=tuple(self._hosts(named).items()))
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
        ups = [f"{self._up}{rank}" for rank in range(self._seat.world_size)]
        complete = False
        if self._wait(self._ready):
            if self._wire.has(self._verdict):
                return self._read()
            complete = self._wire.wait(partial(self._wire.has, *ups), time.monotonic() + GRACE_SECONDS)
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
        if own.failure is not None:
            self._waiting.limit(2 * GRACE_SECONDS)
        if self._wait(self._verdict):
            return self._read()
        return self._declare(self._partial(self._outcomes(own)))

    def _wait(self, key: str) -> bool:
        peers, waiting, found = self._peers, self._waiting, False
        pause = time.sleep if peers is None else partial(peers.pause, store=self._peers_store)

        def ended() -> bool:
            nonlocal found
            lost = peers is not None and bool(peers.lost)  # first: a lost rank may have been the last one to arrive
            found = self._wire.has(key)
            return found or lost or (time.monotonic() >= waiting.due and waiting.over())

        self._wire.wait(ended, math.inf, pause)
        return found

    def _count(self) -> int:
        return self._wire.add(self._arrived, 0)

    def _is_here(self, rank: int) -> bool:
        return rank == self._seat.rank or self._wire.has(f"{self._up}{rank}")

    def _report(self) -> str:
        """Return the ranks that this one waits for, or an empty string: one rank logs, mostly the coordinator."""
        lead, world = self._seat.coordinator_rank, self._seat.world_size
        if not self._leads:
            if self._is_here(lead):
                logs = self._seat.rank == (0 if lead else 1) and self._count() == world
                return f"the decision of {format_ranks([lead], self._hosts([lead]))}" if logs else ""
            if self._place != 1:
                return ""
        absent = [rank for rank in range(world) if not self._is_here(rank)]
        return name_missing(absent, world, self._hosts(absent))

    def _hosts(self, ranks: Sequence[int]) -> dict[int, str]:
        if self._peers is None or self._peers_store is None:
            return {}
        return self._peers.host_names(self._peers_store, ranks[:_MAX_HOST_NAMES])

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


def name_missing(ranks: Sequence[int], world_size: int, hosts: Mapping[int, str] | None = None) -> str:
    """Return text such as `2 of 16,384 ranks: 17 (node-3), 901`; empty without ranks."""
    names = format_ranks(ranks, hosts).partition(" ")[2]
    return f"{len(ranks):,} of {world_size:,} ranks: {names}" if ranks else ""

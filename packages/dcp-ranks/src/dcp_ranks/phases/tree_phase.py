"""One phase over a tree of connections: ranks relay outcomes up to the coordinator, and its verdict down to all ranks.

The verdict (result of the phase) is set in the store before it is sent down, and all ranks poll the store from time to
time: a rank that fails, reaches its deadline or detects a lost rank can therefore end the phase as in `store_phase`.
Further keys of a phase: `here/<rank>` of ranks that have waited for long, `strays` and `stray/<n>` of ranks that cannot
connect to the rank above. Not in this module: connections.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from dcp_ranks.peers.monitor import DOWN, UP, Peers
from dcp_ranks.phases.outcomes import Outcome, Step, Verdict
from dcp_ranks.phases.phases import Answer
from dcp_ranks.phases.store_phase import GRACE_SECONDS, Seat, StoreRound
from dcp_ranks.transport.chunked_store import StoreWire
from dcp_ranks.transport.connection import Frame
from dcp_ranks.transport.pickled import decode, encode

__all__ = ["RelayRound"]

# Polling interval of the store: all ranks together a thousand times a second, but each soon enough.
_LOOKS_PER_SECOND = 1024
_LEAST_LOOK_SECONDS, _MOST_LOOK_SECONDS = 0.1, 2.0
_HERE_AFTER_SECONDS = 0.5
_HAND_DOWN_SECONDS = 30.0
# Ranks that give up at the same time would all look for the missing ones: they do so one after the other.
_TURN_SECONDS = 0.002
_COMES_DOWN = "r"

Answers = Mapping[int, bytes]


class RelayRound(StoreRound):
    """Run of one phase on one rank of a group whose ranks relay each other's messages.

    Args:
        wire: Access to the store's keys of the operation.
        step: Phase to run.
        seat: Rank, world size, coordinator rank and timeout of this rank.
        peers: Connections to the ranks above and below.
        sequence: Sequence number of the operation.
    """

    def __init__(self, wire: StoreWire, step: Step, seat: Seat, peers: Peers, sequence: int) -> None:
        super().__init__(wire, step, seat, peers)
        self._links = peers
        self._key = (sequence, step.number)
        self._counter = f"{self._at}strays"
        self.shared.append(self._counter)
        self._told: dict[int, Outcome] = {}
        self._via: dict[int, int | None] = {}
        """Rank → rank directly below that relayed its outcome; None for an outcome that came through the store."""
        self._strayed: list[int] = []
        """Ranks whose outcomes this rank has left in the store."""
        self._came: tuple[Verdict, Answers] | None = None
        self._decided: Verdict | None = None
        self._decided_at = 0.0
        looks = seat.world_size / _LOOKS_PER_SECOND
        self._look_seconds = min(max(looks, _LEAST_LOOK_SECONDS), _MOST_LOOK_SECONDS)
        self._next_look = self._started + self._look_seconds
        self._here_at: float | None = self._started + min(_HERE_AFTER_SECONDS, seat.timeout_seconds / 8)

    def run(self, outcome: Outcome, conclude: Callable[[list[Outcome]], Answer]) -> tuple[Verdict, bytes | None]:
        """Run the phase over the connections of the tree; arguments and results as in `StoreRound.run`."""
        self._links.read(self._key)
        self._told[self._seat.rank] = outcome
        if self._leads:
            verdict, answers = self._gather(conclude)
        else:
            self._send_up(self._seat.rank, encode(outcome))
            verdict, answers = self._await(outcome)
        self._hand_down(verdict, answers)
        self._wire.delete(self._own_keys)
        return verdict, answers.get(self._seat.rank)

    def _gather(self, conclude: Callable[[list[Outcome]], Answer]) -> tuple[Verdict, Answers]:
        """On the coordinator: wait for all outcomes and decide."""
        end = self._started + self._seat.timeout_seconds
        failed = False
        while len(self._told) < self._seat.world_size and not self._links.lost and time.monotonic() < end:
            if not failed and any(outcome.failure for outcome in self._told.values()):
                failed = True
                end = min(end, time.monotonic() + GRACE_SECONDS)
            ended = self._turn(end)
            if ended is not None:
                return ended, {}
        if len(self._told) < self._seat.world_size:
            return self._declare(self._partial(self._known())), {}
        self._leave_off()
        return self._decide(conclude([self._told[rank] for rank in range(self._seat.world_size)]))

    def _decide(self, answer: Answer) -> tuple[Verdict, Answers]:
        answers = dict(enumerate(answer.each)) if answer.verdict.scattered else {}
        keys = []
        for rank, via in self._via.items():
            if via is None and rank in answers:
                keys += self._wire.put(f"{self._at}each/{rank}", answers[rank])
        verdict = self._declare(answer.verdict)
        if verdict is not answer.verdict:
            self._wire.delete(keys)
            return verdict, {}
        return verdict, answers

    def _await(self, own: Outcome) -> tuple[Verdict, Answers]:
        """On other ranks: wait for the verdict from the rank above, or from the store."""
        end = self._started + self._patience(own) + self._seat.rank * _TURN_SECONDS
        while True:
            ended = self._turn(end)
            if self._came is not None:
                return self._came
            if ended is None and self._decided is None and (self._links.lost or time.monotonic() >= end):
                ended = self._note(self._declare(self._partial(self._known())))
            if ended is not None:
                return ended, {}
            if self._decided is not None:
                end = self._decided_at + _HAND_DOWN_SECONDS
                decided = self._without_above(self._decided)
                if decided is not None:
                    return decided

    def _without_above(self, decided: Verdict) -> tuple[Verdict, Answers] | None:
        """Return the result if all went well but the rank above will send no answer; None to go on waiting."""
        above = self._links.above_rank
        if self._links.cut_off and self._strayed:
            if not decided.scattered:
                return decided, {}
            return decided, {rank: self._fetch(rank) for rank in self._strayed}
        if above in self._links.lost and self._links.above_closed:
            self._turn(time.monotonic())  # another thread may have received the answer, and then noticed the loss
            if self._came is not None:
                return self._came
            return Verdict(lost=((above, self._links.lost[above]),)), {}
        if time.monotonic() >= self._decided_at + _HAND_DOWN_SECONDS:
            return Verdict(missing=(above,), waited_seconds=time.monotonic() - self._started), {}
        return None

    def _turn(self, end: float) -> Verdict | None:
        """Wait briefly and process incoming frames; returns the verdict if the store says that the phase failed."""
        self._links.pause(max(0.0, min(end, self._next_look) - time.monotonic()))
        for below, frame in self._links.take(self._key):
            if frame.kind == DOWN:
                verdict, answers, self.shared = decode(frame.body)
                self._came = verdict, answers
            elif frame.kind == UP:
                self._via[frame.rank] = below
                if self._leads:
                    self._told[frame.rank] = decode(frame.body)
                else:
                    self._send_up(frame.rank, frame.body)
        return self._look() if time.monotonic() >= self._next_look and self._came is None else None

    def _look(self) -> Verdict | None:
        now = time.monotonic()
        self._next_look = now + self._look_seconds
        if self._here_at is not None and now >= self._here_at:
            self._here_at = None
            self._own_keys += self._wire.put(self._here(self._seat.rank), b"")
        if self._leads:
            self._collect_strays()
        elif self._links.cut_off:
            self._stray()
        return self._note(self._read()) if self._wire.has(self._verdict) else None

    def _note(self, verdict: Verdict) -> Verdict | None:
        """Return the verdict, unless the phase went well: then the answer will follow."""
        if not verdict.ok:
            return verdict
        if self._decided is None:
            self._decided, self._decided_at = verdict, time.monotonic()
        return None

    def _send_up(self, rank: int, body: bytes | bytearray) -> None:
        self._links.send_up(Frame(UP, *self._key, rank, body))

    def _stray(self) -> None:
        for frame in self._links.take_back(self._key):
            number = self._wire.add(self._counter)
            self._own_keys += self._wire.put(f"{self._at}stray/{number}", encode((frame.rank, bytes(frame.body))))
            self._strayed.append(frame.rank)

    def _collect_strays(self) -> None:
        while self._wire.has(key := f"{self._at}stray/{sum(via is None for via in self._via.values()) + 1}"):
            data, _ = self._wire.get(key)
            rank, body = decode(data)
            self._told[rank] = decode(body)
            self._via[rank] = None

    def _leave_off(self) -> None:
        """Remove the keys by which this rank shows that it waits: from now on it works, and others may wait for it."""
        self._wire.delete(self._own_keys)
        self._own_keys = []

    def _here(self, rank: int) -> str:
        return f"{self._at}here/{rank}"

    def _known(self) -> list[Outcome | None]:
        return [self._told.get(rank) for rank in range(self._seat.world_size)]

    def _partial(self, outcomes: list[Outcome | None]) -> Verdict:
        """Return the verdict as in `StoreRound`; ranks that wait below a missing rank do not count as missing."""
        verdict = super()._partial(outcomes)
        missing, unheard = self._away(verdict.missing), self._away(verdict.unheard)
        if verdict.missing and not missing:
            missing = verdict.missing if self._leads else (self._seat.coordinator_rank,)
        return replace(verdict, missing=missing, unheard=unheard)

    def _away(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if not self._wire.has(self._here(rank)))

    def _text(self, verdict: Verdict) -> tuple[str, list[str]]:
        """Return the text as in `StoreRound`; a large answer sent over connections stays out of the store."""
        large = verdict.ok and verdict.common is not None and len(verdict.common) > self.INLINE_BYTES
        if self._leads and large and None not in self._via.values():
            return _COMES_DOWN, []
        return super()._text(verdict)

    def _open(self, text: str) -> Verdict:
        return Verdict(scattered=True) if text == _COMES_DOWN else super()._open(text)

    def _hand_down(self, verdict: Verdict, answers: Answers) -> None:
        """Send the verdict and the answers to the ranks below, and wait until the frames are sent."""
        through: defaultdict[int | None, list[int]] = defaultdict(list)
        for rank, via in self._via.items():
            through[via].append(rank)
        same = b"" if answers else encode((verdict, {}, self.shared))
        for below in self._links.below:
            body = same
            if answers:
                body = encode((verdict, {rank: answers[rank] for rank in through[below]}, self.shared))
            self._links.send_down(below, Frame(DOWN, *self._key, self._seat.rank, body))
        end = time.monotonic() + _HAND_DOWN_SECONDS
        while self._links.sending_down and time.monotonic() < end:
            self._links.pause(0.05)

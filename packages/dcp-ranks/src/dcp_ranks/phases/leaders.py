"""Phases over a tree of connections, for groups above `PeerOptions.leaders_above` ranks.

Leaders relay outcomes up to the coordinator, and its verdict down. The coordinator first sets the verdict in the
store, which all ranks poll, so any rank can end the phase as in `store_phase`. Further keys of a phase: `here/<rank>`
of ranks that have waited for long, `strays` and `stray/<n>` of ranks that cannot connect to the rank above.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from dcp_ranks.interrupts import interrupts_deferred
from dcp_ranks.options import PeerOptions
from dcp_ranks.peers.monitor import SLEEP_BELOW_SECONDS, Peers
from dcp_ranks.peers.roster import Card
from dcp_ranks.phases.phases import Answer, Outcome, Verdict
from dcp_ranks.phases.store_phase import GRACE_SECONDS, Seat, StoreRound
from dcp_ranks.transport.connection import Frame, Key, Link, Mail, series_number
from dcp_ranks.transport.store_wire import KeyValueStore, StoreWire, decode, encode

_UP, _DOWN, _READING = 0, 1, 4  # kinds of frames; 2 and 3 greet, in `monitor`

# All ranks together poll the store a thousand times a second; each at least every two seconds.
_POLLS_PER_SECOND = 1024
_LEAST_POLL_SECONDS, _MOST_POLL_SECONDS = 0.1, 2.0
_HERE_AFTER_SECONDS = 0.5
_HAND_DOWN_SECONDS = 30.0
# Ranks that stop waiting at the same time look for missing ranks one after the other.
_TURN_SECONDS = 0.002
_COMES_DOWN = "r"

Answers = Mapping[int, bytes]


class Relays(Peers):
    """Monitor of a large group, whose connections also carry frames."""

    def __init__(self, *args: Any, options: PeerOptions, **more: Any) -> None:
        self._mail = Mail()
        self._begun: dict[int, int] = {}
        self._first: dict[int, int] = {}
        super().__init__(*args, options=options, fan_out=options.fan_out, **more)

    @property
    def below(self) -> list[int]:
        """Connected ranks directly below."""
        return list(self._below)

    @property
    def above_rank(self) -> int:
        """The rank directly above; -1 on the coordinator, and before `meet`."""
        return -1 if self._above_card is None else self._above_card.rank

    @property
    def above_closed(self) -> bool:
        """Whether no connection leads above; its frames are all received."""
        return self._above is None

    @property
    def sending_down(self) -> bool:
        """Whether frames to ranks below are being sent."""
        return any(link.sending for link in list(self._below.values()))

    def pause(self, seconds: float, store: KeyValueStore | None = None) -> None:
        """Wait for events, at most `seconds`, and handle them; not in a sleep, which a frame would not end."""
        super().pause(seconds and max(seconds, SLEEP_BELOW_SECONDS), store)

    def begin(self, store: KeyValueStore, series: int, sequence: int) -> tuple[int, int]:
        """Keep an operation's frames until `end`; return its number, and all ranks' first phase over connections."""
        begun = self._begun.setdefault(series, sequence)
        if sequence > 1 and series not in self._first:
            self._first[series] = int(self._wire(store).claim(f"first/{series}", str(begun)))
        operation = series_number(series, sequence)
        with interrupts_deferred(self._lock):
            self._mail.begin(operation)
        return operation, int(sequence <= self._first.get(series, 1))

    def end(self, operation: int) -> None:
        """Discard an operation's remaining frames."""
        with interrupts_deferred(self._lock):
            self._mail.end(operation)

    def read(self, key: Key) -> None:
        """Allow the ranks below to send a phase's large frames."""
        with interrupts_deferred(self._lock):
            self._mail.reading.add(key)
            for link in list(self._below.values()):
                self._send(link, Frame(_READING, *key, self._rank, b""))

    def take(self, key: Key) -> list[tuple[int, Frame]]:
        """Remove and return a phase's frames, as (sending rank, frame)."""
        with interrupts_deferred(self._lock):
            return self._mail.take(key)

    def send_up(self, frames: Iterable[Frame]) -> None:
        """Send frames to the rank above, once it is connected and ready."""
        with interrupts_deferred(self._lock):
            for frame in frames:
                self._mail.keep_for_above(frame)
            self._send_waiting()

    def take_back(self, key: Key) -> list[Frame]:
        """Remove and return a phase's frames that wait for the rank above."""
        with interrupts_deferred(self._lock):
            return self._mail.take_back(key)

    def send_down(self, rank: int, frame: Frame) -> None:
        """Send a frame to a rank directly below, if connected."""
        with interrupts_deferred(self._lock):
            if rank in self._below:
                self._send(self._below[rank], frame)

    def _send_waiting(self) -> None:
        if self._above is not None and self._above.rank is not None:
            self._send(self._above, *self._mail.ready_for_above())

    def _calls(self, above: Card, seen: Container[int]) -> bool:
        del above, seen
        return True

    def _cannot_accept(self, door: socket.socket, error: OSError) -> None:
        """Raise: without these connections, no phase ends."""
        del door
        raise error

    def _shut_doors_if_all_came(self) -> None:
        """Do nothing: ranks of other hosts may still come."""

    def _sort(self, link: Link, frame: Frame) -> None:
        if link.rank is None:
            super()._sort(link, frame)
        elif frame.kind == _READING:
            self._mail.asked.add((frame.sequence, frame.step))
            self._send_waiting()
        else:
            self._mail.put(link.rank, frame)

    def _greet(self, link: Link, frame: Frame) -> None:
        super()._greet(link, frame)
        if link.rank is None:
            return
        if link is self._above:
            self._send_waiting()
            return
        for key in self._mail.reading:
            self._send(link, Frame(_READING, *key, self._rank, b""))


class RelayRound(StoreRound):
    """One phase on one rank of a group with leaders."""

    def __init__(
        self, wire: StoreWire, number: int, seat: Seat, peers: Relays, peers_store: KeyValueStore, operation: int
    ) -> None:
        super().__init__(wire, number, seat, peers, peers_store)
        self._links = peers
        self._key = (operation, number)
        self._counter, self._here = f"{self._at}strays", f"{self._at}here/"
        self.shared.append(self._counter)
        self._told: dict[int, Outcome] = {}
        self._via: dict[int, int | None] = {}
        """Rank → rank directly below that relayed its outcome; None for the store."""
        self._strayed: list[int] = []
        self._came: tuple[Verdict, Answers] | None = None
        self._decided: Verdict | None = None
        self._decided_at = 0.0
        self._look_seconds = min(max(seat.world_size / _POLLS_PER_SECOND, _LEAST_POLL_SECONDS), _MOST_POLL_SECONDS)
        self._next_look = self._started + self._look_seconds
        self._here_at: float | None = self._started + min(_HERE_AFTER_SECONDS, seat.timeout_seconds / 8)

    def run(self, outcome: Outcome, conclude: Callable[[list[Outcome]], Answer]) -> tuple[Verdict, bytes | None]:
        """See `StoreRound.run`."""
        self._links.read(self._key)
        self._tell(self._seat.rank, outcome)
        self._waiting.phase = outcome.label.partition(" ")[2]
        if self._leads:
            verdict, answers = self._gather(conclude)
        else:
            self._links.send_up([Frame(_UP, *self._key, self._seat.rank, encode(outcome))])
            verdict, answers = self._await(outcome)
        self._hand_down(verdict, answers)
        self._wire.delete(self._own_keys)
        return verdict, answers.get(self._seat.rank)

    def _gather(self, conclude: Callable[[list[Outcome]], Answer]) -> tuple[Verdict, Answers]:
        while len(self._told) < self._seat.world_size and not self._links.lost and not self._waiting.over():
            ended = self._turn(self._waiting.due)
            if ended is not None:
                return ended, {}
        if len(self._told) < self._seat.world_size:
            return self._declare(self._partial(self._known())), {}
        self._wire.delete(self._own_keys)
        self._own_keys = []
        return self._decide(conclude([self._told.pop(rank) for rank in range(self._seat.world_size)]))

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
        if own.failure is not None:
            self._waiting.limit(2 * GRACE_SECONDS)
        self._waiting.timeout_seconds += self._seat.rank * _TURN_SECONDS
        while True:
            ended = self._turn(self._waiting.due if self._decided is None else self._decided_at + _HAND_DOWN_SECONDS)
            if self._came is not None:
                return self._completed(*self._came)
            if ended is None and self._decided is None and (self._links.lost or self._waiting.over()):
                ended = self._note(self._declare(self._partial(self._known())))
            if ended is not None:
                return ended, {}
            if self._decided is not None:
                decided = self._without_above(self._decided)
                if decided is not None:
                    return decided

    def _without_above(self, decided: Verdict) -> tuple[Verdict, Answers] | None:
        above = self._links.above_rank
        if self._seat.rank in self._strayed:
            return self._completed(decided, {})
        if above in self._links.lost and self._links.above_closed:
            self._turn(time.monotonic())  # another thread may have received the answer, and then noticed the loss
            if self._came is not None:
                return self._completed(*self._came)
            return Verdict(lost=((above, self._links.lost[above]),)), {}
        if time.monotonic() >= self._decided_at + _HAND_DOWN_SECONDS:
            return Verdict(missing=(above,), waited_seconds=time.monotonic() - self._started), {}
        return None

    def _completed(self, verdict: Verdict, answers: Answers) -> tuple[Verdict, Answers]:
        strayed = self._strayed if verdict.scattered else []
        return verdict, {**answers, **{rank: self._fetch(rank) for rank in strayed if rank not in answers}}

    def _turn(self, end: float) -> Verdict | None:
        self._links.pause(max(0.0, min(end, self._next_look) - time.monotonic()))
        taken = self._links.take(self._key)
        for below, frame in taken:
            if frame.kind == _DOWN:
                verdict, answers, self.shared = decode(frame.body)
                self._came = verdict, answers
            elif frame.kind == _UP:
                self._via[frame.rank] = below
                if self._leads:
                    self._tell(frame.rank, decode(frame.body))
        if taken and not self._leads:
            self._links.send_up(frame for _, frame in taken if frame.kind == _UP)
        return self._look() if time.monotonic() >= self._next_look and self._came is None else None

    def _tell(self, rank: int, outcome: Outcome) -> None:
        self._told[rank] = outcome
        if self._leads and outcome.failure is not None:
            self._waiting.limit(time.monotonic() - self._started + GRACE_SECONDS)

    def _look(self) -> Verdict | None:
        now = time.monotonic()
        self._next_look = now + self._look_seconds
        if self._here_at is not None and now >= self._here_at:
            self._here_at = None
            self._own_keys += self._wire.put(f"{self._here}{self._seat.rank}", b"")
            self._place = self._wire.add(self._arrived)
        if self._leads:
            self._collect_strays()
        elif self._links.above_closed:
            self._stray()
        decided = self._wire.has(self._verdict)  # asked to the end: it tells whether the store still answers
        return self._note(self._read()) if decided and self._decided is None else None

    def _note(self, verdict: Verdict) -> Verdict | None:
        if not verdict.ok:
            return verdict
        if self._decided is None:
            self._decided, self._decided_at = verdict, time.monotonic()
        return None

    def _stray(self) -> None:
        for frame in self._links.take_back(self._key):
            number = self._wire.add(self._counter)
            self._own_keys += self._wire.put(f"{self._at}stray/{number}", encode((frame.rank, bytes(frame.body))))
            self._strayed.append(frame.rank)

    def _collect_strays(self) -> None:
        while self._wire.has(key := f"{self._at}stray/{sum(via is None for via in self._via.values()) + 1}"):
            data, _ = self._wire.get(key)
            rank, body = decode(data)
            self._tell(rank, decode(body))
            self._via[rank] = None

    def _count(self) -> int:
        return max(len(self._told), super()._count())

    def _is_here(self, rank: int) -> bool:
        return rank in self._told or self._wire.has(f"{self._here}{rank}")

    def _known(self) -> list[Outcome | None]:
        return [self._told.get(rank) for rank in range(self._seat.world_size)]

    def _partial(self, outcomes: list[Outcome | None]) -> Verdict:
        """Do as `StoreRound`; ranks that wait below a missing rank are not missing."""
        verdict = super()._partial(outcomes)
        missing, unheard = self._away(verdict.missing), self._away(verdict.unheard)
        if verdict.missing and not missing:
            missing = verdict.missing if self._leads else (self._seat.coordinator_rank,)
        return replace(verdict, missing=missing, unheard=unheard)

    def _away(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if not self._wire.has(f"{self._here}{rank}"))

    def _text(self, verdict: Verdict) -> tuple[str, list[str]]:
        """Do as `StoreRound`; large answers over connections stay out of the store."""
        large = verdict.ok and verdict.common is not None and len(verdict.common) > self.INLINE_BYTES
        if self._leads and large and None not in self._via.values():
            return _COMES_DOWN, []
        return super()._text(verdict)

    def _open(self, text: str) -> Verdict:
        return Verdict(scattered=True) if text == _COMES_DOWN else super()._open(text)

    def _hand_down(self, verdict: Verdict, answers: Answers) -> None:
        through: defaultdict[int | None, list[int]] = defaultdict(list)
        for rank, via in self._via.items():
            through[via].append(rank)
        same = b"" if answers else encode((verdict, {}, self.shared))
        for below in self._links.below:
            parts = {rank: answers[rank] for rank in through[below]} if answers else {}
            body = encode((verdict, parts, self.shared)) if answers else same
            self._links.send_down(below, Frame(_DOWN, *self._key, self._seat.rank, body))
        end = time.monotonic() + _HAND_DOWN_SECONDS
        while self._links.sending_down and time.monotonic() < end:
            self._links.pause(0.05)

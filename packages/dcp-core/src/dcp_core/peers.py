"""The other ranks as one rank watches and reaches them: processes of its host, and connections up and down.

Every rank watches the processes of its host through the kernel (pidfd). A rank that does not see the one above it so
holds a connection to it, whose lease the kernels keep: nothing here needs a thread, and a process that does not run for
minutes is not taken for dead. Above a number of ranks, leaders of hosts stand between, and the connections carry what
the phases exchange, too. Not here: phases.
"""

from __future__ import annotations

import hmac
import logging
import os
import select
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field

from dcp_core.peer_cards import Card, CardBox
from dcp_core.process_identity import ProcessIdentity, own_identity, watch_process
from dcp_core.rank_link import Frame, Link, listen, own_addresses
from dcp_core.rank_mail import Key, Mail
from dcp_core.store_wire import KeyValueStore, StoreWire

__all__ = ["DOWN", "UP", "PeerOptions", "Peers"]

UP, DOWN, _HELLO, _WELCOME, _READING = range(5)

_CONNECT_SECONDS = 3.0  # for each address
_ENDED = "its process has ended"
_GONE = "its process has ended, or its host is gone"
_LOOPBACK = "127.0.0.1"
_SLEEP_BELOW_SECONDS = 0.002  # `epoll` counts in milliseconds

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """How ranks watch and reach each other; the same on all ranks.

    Attributes:
        peer_timeout_seconds: After how long a host that does not answer counts as gone.
        leaders_above: Up to so many ranks all stand below the coordinator; of more, leaders of hosts stand between.
        fan_out: How many leaders of hosts stand below one.
    """

    peer_timeout_seconds: float = 120.0
    leaders_above: int = 256
    fan_out: int = 16


@dataclass(slots=True)
class _Held:
    """What is to be closed, whoever lets go of it."""

    poller: select.epoll = field(default_factory=select.epoll)
    door: socket.socket | None = None
    links: dict[int, Link] = field(default_factory=dict)
    watched: dict[int, int] = field(default_factory=dict)

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        for descriptor in self.watched:
            os.close(descriptor)
        if self.door is not None:
            self.door.close()
        self.links.clear()
        self.watched.clear()
        self.door = None
        self.poller.close()


class Peers:
    """Who of a group's ranks is gone; with leaders also the way up to the coordinator and down from it.

    Shared by all operations of one group with one coordinator rank, in any threads of this process.

    Args:
        store: A connection over which to leave this rank's card; waits for no rank.
        sequence: The number of the operation that makes this; the same on all ranks.
        rank: This rank.
        world_size: The number of ranks.
        coordinator_rank: The rank at the top.
        options: The same on all ranks.
        process: Who this rank is, where one process plays several.
    """

    def __init__(
        self,
        store: KeyValueStore,
        sequence: int,
        rank: int,
        world_size: int,
        coordinator_rank: int,
        *,
        options: PeerOptions | None = None,
        process: ProcessIdentity | None = None,
    ) -> None:
        self._options = options or PeerOptions()
        self.relays = world_size > self._options.leaders_above
        """Whether phases travel over the connections."""
        self._prefix = f"dcp/peers/{sequence}/"
        self._rank = rank
        self._world_size = world_size
        self._leads = rank == coordinator_rank
        self._process = process or own_identity()
        self._lock = threading.RLock()
        self._held = _Held()
        self.close = weakref.finalize(self, self._held.close)
        """Closes everything."""
        self._met = False
        self._above: Link | None = None
        self._above_card: Card | None = None
        self._addresses: list[str] = []
        self._again = False
        self._give_up_at = 0.0
        self._below: dict[int, Link] = {}
        self._lost: dict[int, str] = {}
        self._mail = Mail()
        wire = StoreWire(store, self._prefix, world_size)
        self._cards = CardBox(wire, self._process, self._options.fan_out if self.relays else None)
        self._cards.leave(wire, rank, leads=self._leads, open_door=self._open_door)
        _alive.add(self)

    @property
    def lost(self) -> dict[int, str]:
        """The ranks known to be gone, and how that is known."""
        return self._lost

    @property
    def below(self) -> list[int]:
        """The ranks right below that are connected."""
        return list(self._below)

    @property
    def above_rank(self) -> int:
        """The rank above, once this one has looked for it; -1 for the coordinator."""
        return -1 if self._above_card is None else self._above_card.rank

    @property
    def cut_off(self) -> bool:
        """Whether the rank above cannot be reached over a connection, though it may live."""
        above = self._above_card
        return above is not None and self._above is None and above.rank not in self._lost

    @property
    def sending_down(self) -> bool:
        """Whether something waits to be sent to ranks below."""
        return any(link.sending for link in list(self._below.values()))

    def meet(self, store: KeyValueStore) -> None:
        """Find and watch the others, once all have left their cards; nothing if that was done."""
        with self._lock:
            if self._met:
                return
            wire = StoreWire(store, self._prefix, self._world_size)
            self._watch_host(wire)
            above = None if self._leads else self._cards.above(wire)
            self._met = True
            seen = {*self._held.watched.values(), *self._lost}
            if above is not None and (self.relays or above.rank not in seen):
                self._above_card = above
                self._addresses = self._in_order(above)
                self._connect()
            elif self._leads and not self.relays and len(seen) == self._world_size - 1:
                self._shut_door()  # nobody will come

    def look_around(self, store: KeyValueStore) -> None:
        """Watch the ranks of this host that have come; nothing once all have met."""
        with self._lock:
            if not self._met:
                self._watch_host(StoreWire(store, self._prefix, self._world_size))

    def pause(self, seconds: float) -> None:
        """Wait so long, or until something happens; attend to it."""
        if seconds < _SLEEP_BELOW_SECONDS and not self.relays:
            time.sleep(max(0.0, seconds))
            seconds = 0.0
        for descriptor, events in self._held.poller.poll(max(0.0, seconds)):
            with self._lock:
                self._attend(descriptor, events)
        with self._lock:
            above = self._above
            if above is not None and above.rank is None and not above.reached and time.monotonic() > self._give_up_at:
                above.broken = "it does not answer"
                self._drop(above)

    def begin(self, sequence: int) -> None:
        """An operation starts: keep what comes in for it."""
        with self._lock:
            self._mail.begin(sequence)

    def end(self, sequence: int) -> None:
        """An operation has ended: forget what came in for it."""
        with self._lock:
            self._mail.end(sequence)

    def read(self, key: Key) -> None:
        """Take what comes for a phase from now on, large frames as well."""
        with self._lock:
            self._mail.reading.add(key)
            for link in list(self._below.values()):
                self._send(link, Frame(_READING, *key, self._rank, b""))

    def take(self, key: Key) -> list[tuple[int, Frame]]:
        """What has come in for a phase: from which neighbour, and the frame."""
        with self._lock:
            return self._mail.take(key)

    def send_up(self, frame: Frame) -> None:
        """Send to the rank above, now or as soon as it is there and reads."""
        with self._lock:
            self._mail.keep_for_above(frame)
            self._send_waiting()

    def take_back(self, key: Key) -> list[Frame]:
        """What was to be sent up in a phase, and was not."""
        with self._lock:
            return self._mail.take_back(key)

    def send_down(self, rank: int, frame: Frame) -> None:
        """Send to a rank right below, if it is connected."""
        with self._lock:
            if rank in self._below:
                self._send(self._below[rank], frame)

    def _open_door(self) -> tuple[tuple[str, ...], int]:
        self._held.door = door = listen()
        self._held.poller.register(door.fileno(), select.EPOLLIN)
        return tuple(own_addresses()), door.getsockname()[1]

    def _shut_door(self) -> None:
        if self._held.door is not None:
            self._held.poller.unregister(self._held.door.fileno())
            self._held.door.close()
            self._held.door = None

    def _watch_host(self, wire: StoreWire) -> None:
        known = {self._rank, *self._held.watched.values(), *self._lost}
        for card in self._cards.of_host(wire):
            if card.rank not in known:
                self._watch(card)

    def _watch(self, card: Card) -> None:
        try:
            descriptor = watch_process(card.process, self._process.host)
        except ProcessLookupError:
            self._lost[card.rank] = _ENDED
            return
        if descriptor is not None:
            self._held.watched[descriptor] = card.rank
            self._held.poller.register(descriptor, select.EPOLLIN)

    def _in_order(self, card: Card) -> list[str]:
        near = card.process.host == self._process.host
        return sorted(card.addresses, key=lambda address: (address == _LOOPBACK) != near)

    def _connect(self) -> None:
        """Try the next address of the rank above."""
        self._above, card = None, self._above_card
        if card is None:
            return
        if not self._addresses and self._again:
            self._lost.setdefault(card.rank, f"its connection was closed, and it cannot be reached again: {_GONE}")
            return
        if not self._addresses:
            _log.warning(
                "rank %d: no connection to rank %d can be made; should its host be lost, the deadline alone will tell",
                self._rank,
                card.rank,
            )
            return
        address = self._addresses.pop(0)
        try:
            made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            self._connect()
            return
        self._above = link = Link(made, self._options.peer_timeout_seconds)
        made.connect_ex((address, card.port))  # what goes wrong shows when something is sent
        self._give_up_at = time.monotonic() + _CONNECT_SECONDS
        self._hold(link)
        self._send(link, Frame(_HELLO, 0, 0, self._rank, self._cards.token))

    def _hold(self, link: Link) -> None:
        self._held.links[link.fileno()] = link
        self._held.poller.register(link.fileno(), select.EPOLLIN)

    def _attend(self, descriptor: int, events: int) -> None:
        if self._held.door is not None and descriptor == self._held.door.fileno():
            self._accept(self._held.door)
        elif descriptor in self._held.watched:
            self._held.poller.unregister(descriptor)
            self._lost[self._held.watched.pop(descriptor)] = _ENDED
            os.close(descriptor)
        elif (link := self._held.links.get(descriptor)) is not None:
            if events & select.EPOLLOUT:
                link.flush()
            for frame in link.receive():
                self._sort(link, frame)
            self._settle(link)

    def _accept(self, door: socket.socket) -> None:
        while True:
            try:
                connection, _ = door.accept()
            except OSError:  # nobody more, or gone again, or no descriptor left
                return
            self._hold(Link(connection, self._options.peer_timeout_seconds))

    def _sort(self, link: Link, frame: Frame) -> None:
        if link.rank is None:
            self._greet(link, frame)
        elif frame.kind == _READING:
            self._mail.asked((frame.sequence, frame.step))
            self._send_waiting()
        else:
            self._mail.put(link.rank, frame)

    def _greet(self, link: Link, frame: Frame) -> None:
        expected = _WELCOME if link is self._above else _HELLO
        if frame.kind != expected or not hmac.compare_digest(frame.body, self._cards.token):
            link.broken = "it does not belong to this job"
            return
        link.rank = frame.rank
        if link is self._above:
            self._send_waiting()
            return
        self._below[frame.rank] = link
        self._send(link, Frame(_WELCOME, 0, 0, self._rank, self._cards.token))
        for key in self._mail.reading:
            self._send(link, Frame(_READING, *key, self._rank, b""))

    def _send_waiting(self) -> None:
        if self._above is not None and self._above.rank is not None:
            for frame in self._mail.ready_for_above():
                self._send(self._above, frame)

    def _send(self, link: Link, frame: Frame) -> None:
        link.send(frame)
        self._settle(link)

    def _settle(self, link: Link) -> None:
        """After each use of a link: let go of it if it is broken, else wait for what it waits for."""
        if link.broken is not None:
            self._drop(link)
        elif link.fileno() in self._held.links:
            self._held.poller.modify(link.fileno(), select.EPOLLIN | (select.EPOLLOUT if link.sending else 0))

    def _drop(self, link: Link) -> None:
        if self._held.links.pop(link.fileno(), None) is None:
            return
        self._held.poller.unregister(link.fileno())
        link.close()
        if link.rank is not None:
            self._lost.setdefault(link.rank, f"{link.broken}: {_GONE}")
            self._below.pop(link.rank, None)
            self._above = None if link is self._above else self._above
        elif link is self._above and self._above_card is not None:
            if link.reached and not self._again:  # it may have ended before it answered: who lives can be reached again
                self._again = True
                self._addresses = self._in_order(self._above_card)
            self._connect()


_alive: weakref.WeakSet[Peers] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child must not keep connections open that would tell others that its parent lives."""
    for peers in list(_alive):
        peers.close()


os.register_at_fork(after_in_child=_let_go_in_child)

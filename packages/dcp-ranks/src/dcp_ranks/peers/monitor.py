"""Watch the other ranks of a tree: processes of this host by pidfd, the rank above on another host by a connection.

TCP keepalive checks both hosts, so the monitor needs no thread, and a suspended process does not count as dead.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import threading
import time
import weakref
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from dcp_base.logs import library_logger
from dcp_ranks.interrupts import interrupts_deferred
from dcp_ranks.options import DEFAULT_PEERS, PeerOptions
from dcp_ranks.peers.roster import Card, CardBox, ProcessIdentity, own_identity, watch_process
from dcp_ranks.transport.connection import Frame, Link
from dcp_ranks.transport.listening import (
    CONNECT_TIMEOUT_SECONDS,
    Call,
    Guests,
    Listener,
    addresses_to_announce,
    open_doors,
)
from dcp_ranks.transport.store_wire import KeyValueStore, StoreWire

_HELLO, _WELCOME = 2, 3

_GREET_TIMEOUT_SECONDS = 1.0  # so that a rank that is busy afterwards has identified itself
_CALLS_AGAIN = 5
_SEARCH_SECONDS = 1.0  # before all ranks have met, a waiting rank looks for ranks that arrived and may have died
_ENDED = "its process has ended"
_GONE = "its process has ended, or its host is gone"
_LOOPBACK = "127.0.0.1"
SLEEP_BELOW_SECONDS = 0.002  # `epoll` counts in milliseconds

_log = library_logger(__name__)


class Peers:
    """Monitor that detects lost ranks of a process group, and connects this rank to others in the tree.

    One instance serves all operations of a group with the same coordinator rank, in all threads of this process.

    This rank publishes the identity of `process` (None: the calling process) and its addresses in `store`, where
    `number` tells monitors apart. `number` and `options` are the same on all ranks. The coordinator rank is at the top
    of the tree, which lacks leaders if `fan_out` is None.
    """

    def __init__(
        self,
        store: KeyValueStore,
        number: int,
        rank: int,
        world_size: int,
        coordinator_rank: int,
        *,
        options: PeerOptions | None = None,
        process: ProcessIdentity | None = None,
        fan_out: int | None = None,
    ) -> None:
        self._options = options or DEFAULT_PEERS
        self._prefix = f"dcp/peers/{number}/"
        self._rank = rank
        self._world_size = world_size
        self._leads = rank == coordinator_rank
        self._process = process or own_identity()
        self._lock = threading.RLock()
        self._held = _PeerHandles()
        self.close = weakref.finalize(self, self._held.close)
        """Close all descriptors."""
        self._met = False
        self._found_above = rank == coordinator_rank
        self._above: Link | None = None
        self._above_card: Card | None = None
        self._addresses: list[str] = []
        self._called_again = 0
        self._call: Call | None = None
        self._guests = Guests(partial(Link, peer_timeout_seconds=self._options.peer_timeout_seconds))
        self._give_up_at = 0.0
        self._below: dict[int, Link] = {}
        self.lost: dict[int, str] = {}
        """Lost rank → how, such as "its process has ended". Replaced, never changed: other threads read it."""
        self._looked_at: set[int] = set()
        self._next_search = time.monotonic() + _SEARCH_SECONDS
        wire = self._wire(store)
        self._cards = CardBox(wire, self._process, fan_out)
        self._listener = Listener(self._cards.secret)
        open_door = partial(self._open_door, store)
        self._cards.leave(wire, rank, self._listener.challenge, leads=self._leads, open_door=open_door)
        _alive.add(self)

    def meet(self, store: KeyValueStore, *, complete: bool = True) -> None:
        """Watch the ranks that have left their cards, as all have if `complete`; connect to the rank above."""
        if self._met:
            return
        wire = self._wire(store)  # unlocked: the store may be slow
        cards = self._cards.of_host(wire, frozenset(self._looked_at))
        above = None if self._found_above else self._cards.above(wire)
        if above is not None and above.process.host == self._process.host:
            cards[0] = above  # this host's list, counted from 1, may not have it yet
        with interrupts_deferred(self._lock):
            if self._met:
                return
            self._met = complete
            self._watch_host(cards)
            if above is not None and not self._found_above:
                self._found_above = True
                if self._calls(above, {*self._held.watched.values(), *self.lost}):
                    self._above_card = above
                    self._addresses = self._in_order(above)
                    self._connect()
            self._shut_doors_if_all_came()

    def host_names(self, store: KeyValueStore, ranks: Iterable[int]) -> dict[int, str]:
        """See `CardBox.host_names`."""
        return self._cards.host_names(self._wire(store), ranks)

    def pause(self, seconds: float, store: KeyValueStore | None = None) -> None:
        """Wait at most `seconds` for events, and handle them; look around in `store` once a second."""
        if store is not None and not self._met and time.monotonic() > self._next_search:
            self._next_search = time.monotonic() + _SEARCH_SECONDS
            self.meet(store, complete=False)
        if seconds < SLEEP_BELOW_SECONDS:
            time.sleep(max(0.0, seconds))
            seconds = 0.0
        for descriptor, events in self._held.poller.poll(seconds):
            with interrupts_deferred(self._lock):
                self._attend(descriptor, events)
        with interrupts_deferred(self._lock):
            above = self._above
            if above is not None and above.rank is None and not above.reached and time.monotonic() > self._give_up_at:
                above.broken = "it does not answer"
                self._drop(above)
            self._see_out(self._guests.unwelcome())

    def _calls(self, above: Card, seen: Container[int]) -> bool:
        """Return whether this rank connects to the rank above instead of watching it."""
        return above.rank not in seen

    def _wire(self, store: KeyValueStore) -> StoreWire:
        return StoreWire(store, self._prefix, self._world_size)

    def _open_door(self, store: KeyValueStore) -> tuple[tuple[str, ...], int]:
        doors, addresses, port = open_doors(addresses_to_announce(store, self._options.network), self._options.ports)
        for door in doors:
            self._held.doors[door.fileno()] = door
            self._held.poller.register(door.fileno(), select.EPOLLIN)
        return addresses, port

    def _shut_doors_if_all_came(self) -> None:
        came = {*self._held.watched.values(), *self.lost, *self._below}
        if self._leads and self._met and len(came) == self._world_size - 1:
            for descriptor, door in self._held.doors.items():
                self._held.poller.unregister(descriptor)
                door.close()
            self._held.doors.clear()
            self._see_out([*self._guests.waiting])  # none of the remaining connections is a rank

    def _watch_host(self, cards: Mapping[int, Card]) -> None:
        for number, card in cards.items():
            if card.rank not in {self._rank, *self._held.watched.values(), *self.lost}:
                try:
                    descriptor = watch_process(card.process, self._process.host)
                except ProcessLookupError:
                    self.lost = {**self.lost, card.rank: _ENDED}
                else:
                    if descriptor is None:  # it cannot be watched now
                        continue
                    self._held.watched[descriptor] = card.rank
                    self._held.poller.register(descriptor, select.EPOLLIN)
            self._looked_at.add(number)

    def _lose(self, rank: int, how: str) -> None:
        self.lost = {rank: how, **self.lost}

    def _in_order(self, card: Card) -> list[str]:
        near = card.process.host == self._process.host
        return sorted(card.addresses, key=lambda address: (address == _LOOPBACK) != near)

    def _connect(self, *, lost: str = "") -> None:
        self._above, card = None, self._above_card
        if card is None:
            return
        if not self._addresses and lost:
            self._lose(card.rank, lost)
            return
        if not self._addresses:
            _log.warning(
                "rank %d: no connection to rank %d can be made; if its host is lost, only the timeout will show it",
                self._rank,
                card.rank,
            )
            return
        address = self._addresses.pop(0)
        try:
            made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            self._connect(lost=lost)
            return
        self._above = link = Link(made, self._options.peer_timeout_seconds)
        made.connect_ex((address, card.port))  # a later send reports an error
        self._give_up_at = time.monotonic() + CONNECT_TIMEOUT_SECONDS
        self._held.add_link(link)
        self._call = Call(self._cards.secret, card.challenge, self._rank)
        self._send(link, Frame(_HELLO, 0, 0, self._rank, self._call.hello))
        if link.sending:
            writable = select.poll()
            writable.register(link.fileno(), select.POLLOUT)
            if writable.poll(_GREET_TIMEOUT_SECONDS * 1000):
                link.flush()
                self._settle(link)

    def _attend(self, descriptor: int, events: int) -> None:
        if (door := self._held.doors.get(descriptor)) is not None:
            self._accept(door)
        elif descriptor in self._held.watched:
            readable = select.poll()
            readable.register(descriptor, select.POLLIN)
            if readable.poll(0):  # another thread may have closed and reused the descriptor
                self._held.poller.unregister(descriptor)
                os.close(descriptor)
                self.lost = {**self.lost, self._held.watched.pop(descriptor): _ENDED}
        elif (link := self._held.links.get(descriptor)) is not None:
            if events & select.EPOLLOUT:
                link.flush()
            self._receive(link)

    def _accept(self, door: socket.socket) -> None:
        try:
            for link in self._guests.accept(door):
                self._held.add_link(link)
                self._receive(link)  # a rank's proof has probably arrived already
                self._see_out(self._guests.unwelcome())
        except OSError as error:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            reason = (
                f"rank {self._rank} has no file descriptor left for the connections of other ranks: its limit is "
                f"{limit:,}; raise it with `ulimit -n`, or in the service that starts the job"
            )
            self._cannot_accept(door, OSError(error.errno, reason))

    def _cannot_accept(self, door: socket.socket, error: OSError) -> None:
        """Leave the other ranks unwatched; the store is enough for phases."""
        self._held.poller.unregister(door.fileno())
        _log.warning("%s; if a host is lost, only the timeout will show it", error.strerror)

    def _see_out(self, guests: Iterable[Link]) -> None:
        for link in guests:
            link.broken = "it has not proved that it belongs to this job"
            self._drop(link)

    def _receive(self, link: Link) -> None:
        for frame in link.receive():
            self._sort(link, frame)
        self._settle(link)

    def _sort(self, link: Link, frame: Frame) -> None:
        if link.rank is None:
            self._greet(link, frame)

    def _greet(self, link: Link, frame: Frame) -> None:
        if link is self._above:
            if frame.kind == _WELCOME and self._call is not None and self._call.is_answered_by(frame.body):
                link.rank = frame.rank
            else:
                link.broken = "it does not belong to this job"
            return
        welcome = self._listener.answer(frame.body, frame.rank) if frame.kind == _HELLO else None
        if welcome is None:
            link.broken = "it does not belong to this job"
            return
        link.rank = frame.rank
        self._guests.forget(link)
        self._below[frame.rank] = link
        self._shut_doors_if_all_came()
        self._send(link, Frame(_WELCOME, 0, 0, self._rank, welcome))

    def _send(self, link: Link, *frames: Frame) -> None:
        link.send(*frames)
        self._settle(link)

    def _settle(self, link: Link) -> None:
        if link.broken is not None:
            self._drop(link)
        elif link.sending != link.waits_to_send and link.fileno() in self._held.links:
            link.waits_to_send = link.sending
            self._held.poller.modify(link.fileno(), select.EPOLLIN | (select.EPOLLOUT if link.sending else 0))

    def _drop(self, link: Link) -> None:
        if not self._held.drop_link(link):
            return
        self._guests.forget(link)
        if link.rank is not None:
            self._lose(link.rank, f"{link.broken}: {_GONE}")
            self._below.pop(link.rank, None)
            self._above = None if link is self._above else self._above
        elif link is self._above and self._above_card is not None:
            # The rank may have ended, or closed the connection because of too many guests: try to reach it again.
            if link.reached and not link.silent and self._called_again < _CALLS_AGAIN:
                self._called_again += 1
                self._addresses = self._in_order(self._above_card)
            lost = link.silent or (self._called_again > 0 and not link.reached)
            self._connect(lost=f"{link.broken}: {_GONE}" if lost else "")


_alive: weakref.WeakSet[Peers] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close connections, which would make the parent look alive."""
    for peers in list(_alive):
        peers.close()


os.register_at_fork(after_in_child=_close_in_child)


@dataclass(slots=True)
class _PeerHandles:
    poller: select.epoll = field(default_factory=select.epoll)
    doors: dict[int, socket.socket] = field(default_factory=dict)
    links: dict[int, Link] = field(default_factory=dict)
    watched: dict[int, int] = field(default_factory=dict)

    def add_link(self, link: Link) -> None:
        self.links[link.fileno()] = link
        self.poller.register(link.fileno(), select.EPOLLIN)

    def drop_link(self, link: Link) -> bool:
        """Return False if the connection is not registered."""
        if self.links.pop(link.fileno(), None) is None:
            return False
        self.poller.unregister(link.fileno())
        link.close()
        return True

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        for door in self.doors.values():
            door.close()
        for descriptor in self.watched:
            os.close(descriptor)
        self.links.clear()
        self.doors.clear()
        self.watched.clear()
        self.poller.close()

"""Monitor of the other ranks: watches processes on the same host, and connections to the ranks above and below.

The ranks form a tree with the coordinator at the top. Every rank watches the processes of its host through the kernel
(pidfd). A rank that cannot watch the rank above it in this way holds a TCP connection to that rank, and the kernels
check with TCP keepalive that both hosts answer. So the monitor needs no thread, and a process that is suspended for
minutes does not count as dead. In large groups the leader of each host is between the other ranks of the host and the
coordinator, and the connections also carry the messages (frames) of operations, which are sequences of phases. Not in
this module: phases.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
import weakref
from collections.abc import Iterable, Mapping
from functools import partial

from dcp_ranks.errors import ERROR_TYPES, ErrorTypes
from dcp_ranks.interrupts import UninterruptedLock
from dcp_ranks.peers.handles import PeerHandles
from dcp_ranks.peers.options import PeerOptions
from dcp_ranks.peers.process_identity import ProcessIdentity, own_identity, watch_process
from dcp_ranks.peers.roster import Card, CardBox
from dcp_ranks.transport.chunked_store import KeyValueStore, StoreWire
from dcp_ranks.transport.connection import Frame, Link
from dcp_ranks.transport.handshake import Call, Listener
from dcp_ranks.transport.listening import addresses_to_announce, open_doors
from dcp_ranks.transport.mailbox import Key, Mail
from dcp_ranks.transport.newcomers import Guests

__all__ = ["DOWN", "UP", "Peers"]

UP, DOWN, _HELLO, _WELCOME, _READING = range(5)

_CONNECT_SECONDS = 3.0  # for each address
_GREET_SECONDS = 1.0  # so that a rank that is busy afterwards has identified itself
_CALLS_AGAIN = 5
_ENDED = "its process has ended"
_GONE = "its process has ended, or its host is gone"
_LOOPBACK = "127.0.0.1"
_SLEEP_BELOW_SECONDS = 0.002  # `epoll` counts in milliseconds

_log = logging.getLogger(__name__)  # records hold numbers alone: nothing that a terminal would obey


class Peers:
    """Monitor of the other ranks of a process group: detects lost ranks, and connects this rank to others in the tree.

    One instance serves all operations of a group with the same coordinator rank, in all threads of this process.

    Args:
        store: Connection to the group's store, in which this rank publishes its process identity and addresses.
        number: Number that distinguishes this monitor from others in the same store; the same on all ranks.
        rank: Rank of this process within the group.
        world_size: Number of ranks in the group.
        coordinator_rank: Rank within the group at the top of the tree.
        options: Options for watching and connecting to ranks, the same on all ranks.
        process: Identity of this rank's process; None for the calling process.
        errors: Exception classes to raise.
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
        errors: ErrorTypes = ERROR_TYPES,
    ) -> None:
        self._options = options or PeerOptions()
        self.relays = world_size > self._options.leaders_above
        """Whether the messages of phases are sent over connections between ranks, instead of through the store."""
        self._prefix = f"dcp/peers/{number}/"
        self._rank = rank
        self._world_size = world_size
        self._leads = rank == coordinator_rank
        self._process = process or own_identity()
        self._lock = UninterruptedLock()
        self._held = PeerHandles()
        self.close = weakref.finalize(self, self._held.close)
        """Function that closes all connections, listening sockets and descriptors of processes."""
        self._met = False
        self._above: Link | None = None
        self._above_card: Card | None = None
        self._addresses: list[str] = []
        self._called_again = 0
        self._call: Call | None = None
        self._guests = Guests(partial(Link, peer_timeout_seconds=self._options.peer_timeout_seconds))
        self._give_up_at = 0.0
        self._below: dict[int, Link] = {}
        self._lost: dict[int, str] = {}  # never changed, but replaced: other threads read it
        self._looked_at: set[int] = set()
        self._mail = Mail()
        self._errors = errors
        wire = self._wire(store)
        self._cards = CardBox(wire, self._process, self._options.fan_out if self.relays else None)
        self._listener = Listener(self._cards.secret, self._cards.challenge)
        self._cards.leave(wire, rank, leads=self._leads, open_door=lambda: self._open_door(store))
        _alive.add(self)

    @property
    def lost(self) -> dict[int, str]:
        """Lost rank → description of its loss, such as "its process has ended"."""
        return self._lost

    @property
    def below(self) -> list[int]:
        """The connected ranks directly below this rank in the tree."""
        return list(self._below)

    @property
    def above_rank(self) -> int:
        """The rank directly above this rank in the tree; -1 on the coordinator, and before `meet`."""
        return -1 if self._above_card is None else self._above_card.rank

    @property
    def cut_off(self) -> bool:
        """Whether this rank has no connection to the rank above, although that rank may be alive."""
        above = self._above_card
        return above is not None and self._above is None and above.rank not in self._lost

    @property
    def above_closed(self) -> bool:
        """Whether there is no connection to the rank above: what that rank has sent has been received."""
        return self._above is None

    @property
    def sending_down(self) -> bool:
        """Whether frames (messages) to ranks below have not been sent completely."""
        return any(link.sending for link in list(self._below.values()))

    def meet(self, store: KeyValueStore) -> None:
        """Find the other ranks in the store, watch them, and connect to the rank above; a second call does nothing.

        Every rank must have published its process identity in the store before (see `CardBox.leave`).
        """
        with self._lock:
            if self._met:
                return
            wire = self._wire(store)
            self._watch_host(self._cards.of_host(wire, self._looked_at))
            above = None if self._leads else self._cards.above(wire)
            self._met = True
            seen = {*self._held.watched.values(), *self._lost}
            if above is not None and (self.relays or above.rank not in seen):
                self._above_card = above
                self._addresses = self._in_order(above)
                self._connect()
            self._shut_doors_if_all_came()

    def look_around(self, store: KeyValueStore) -> None:
        """Watch the ranks of this host whose process identities are already in the store; no effect after `meet`."""
        if self._met:
            return
        cards = self._cards.of_host(self._wire(store), frozenset(self._looked_at))  # unlocked: the store may be slow
        with self._lock:
            if not self._met:
                self._watch_host(cards)

    def pause(self, seconds: float) -> None:
        """Wait at most `seconds` for events of connections and processes, and handle them."""
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
            self._see_out(self._guests.unwelcome())

    def begin(self, sequence: int) -> None:
        """Begin the operation with this sequence number: keep its incoming frames (messages) until `take` or `end`."""
        with self._lock:
            self._mail.begin(sequence)

    def end(self, sequence: int) -> None:
        """End the operation with this sequence number: discard its frames that were not taken or sent."""
        with self._lock:
            self._mail.end(sequence)

    def read(self, key: Key) -> None:
        """Allow the ranks below to send large frames of a phase from now on; small frames need no permission.

        Args:
            key: Key of the phase: (sequence number of the operation, number of the phase).
        """
        with self._lock:
            self._mail.reading.add(key)
            for link in list(self._below.values()):
                self._send(link, Frame(_READING, *key, self._rank, b""))

    def take(self, key: Key) -> list[tuple[int, Frame]]:
        """Return and remove the frames received for a phase, as pairs (rank that sent the frame, frame)."""
        with self._lock:
            return self._mail.take(key)

    def send_up(self, frame: Frame) -> None:
        """Send a frame to the rank above, or queue it until that rank is connected and ready to receive."""
        with self._lock:
            self._mail.keep_for_above(frame)
            self._send_waiting()

    def take_back(self, key: Key) -> list[Frame]:
        """Return and remove the frames (messages) of a phase that are queued for the rank above."""
        with self._lock:
            return self._mail.take_back(key)

    def send_down(self, rank: int, frame: Frame) -> None:
        """Send a frame to a rank directly below; does nothing if that rank is not connected."""
        with self._lock:
            if rank in self._below:
                self._send(self._below[rank], frame)

    def _wire(self, store: KeyValueStore) -> StoreWire:
        return StoreWire(store, self._prefix, self._world_size, errors=self._errors)

    def _open_door(self, store: KeyValueStore) -> tuple[tuple[str, ...], int]:
        doors, addresses, port = open_doors(addresses_to_announce(store, self._options.network), self._options.ports)
        self._held.add_doors(doors)
        return addresses, port

    def _shut_doors_if_all_came(self) -> None:
        came = {*self._held.watched.values(), *self._lost, *self._below}
        if self._leads and not self.relays and self._met and len(came) == self._world_size - 1:
            self._held.shut_doors()
            self._see_out(self._guests.waiting)  # none of the remaining connections is a rank

    def _watch_host(self, cards: Mapping[int, Card]) -> None:
        for number, card in cards.items():
            known = {self._rank, *self._held.watched.values(), *self._lost}
            if card.rank in known or self._watch(card):
                self._looked_at.add(number)

    def _watch(self, card: Card) -> bool:
        """Watch a process; returns False if that is not possible, or not now."""
        try:
            descriptor = watch_process(card.process, self._process.host)
        except ProcessLookupError:
            self._lost = {**self._lost, card.rank: _ENDED}
            return True
        if descriptor is not None:
            self._held.add_process(descriptor, card.rank)
        return descriptor is not None

    def _lose(self, rank: int, how: str) -> None:
        self._lost = {rank: how, **self._lost}

    def _in_order(self, card: Card) -> list[str]:
        near = card.process.host == self._process.host
        return sorted(card.addresses, key=lambda address: (address == _LOOPBACK) != near)

    def _connect(self, *, refused: bool = False) -> None:
        """Try the next address of the rank above.

        Args:
            refused: Whether the rank above was reached before, and cannot be reached any more.
        """
        self._above, card = None, self._above_card
        if card is None:
            return
        if not self._addresses and refused:
            self._lose(card.rank, f"its connection was closed, and it cannot be reached again: {_GONE}")
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
            self._connect(refused=refused)
            return
        self._above = link = Link(made, self._options.peer_timeout_seconds)
        made.connect_ex((address, card.port))  # what goes wrong shows when something is sent
        self._give_up_at = time.monotonic() + _CONNECT_SECONDS
        self._held.add_link(link)
        self._call = Call(self._cards.secret, card.challenge, self._rank)
        self._send(link, Frame(_HELLO, 0, 0, self._rank, self._call.hello))
        if link.sending:
            writable = select.poll()
            writable.register(link.fileno(), select.POLLOUT)
            if writable.poll(_GREET_SECONDS * 1000):
                link.flush()
                self._settle(link)

    def _attend(self, descriptor: int, events: int) -> None:
        if (door := self._held.doors.get(descriptor)) is not None:
            self._accept(door)
        elif descriptor in self._held.watched:
            if self._held.has_ended(descriptor):  # not if another thread has closed it, and watches with its number
                self._lost = {**self._lost, self._held.drop_process(descriptor): _ENDED}
        elif (link := self._held.links.get(descriptor)) is not None:
            if events & select.EPOLLOUT:
                link.flush()
            self._receive(link)

    def _accept(self, door: socket.socket) -> None:
        for link in self._guests.accept(door):
            self._held.add_link(link)
            self._receive(link)  # of a rank the proof is there already, most likely
            self._see_out(self._guests.unwelcome())

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
        elif frame.kind == _READING:
            self._mail.asked((frame.sequence, frame.step))
            self._send_waiting()
        else:
            self._mail.put(link.rank, frame)

    def _greet(self, link: Link, frame: Frame) -> None:
        if link is self._above:
            if frame.kind == _WELCOME and self._call is not None and self._call.is_answered_by(frame.body):
                link.rank = frame.rank
                self._send_waiting()
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
        """Close a link if it is broken, else register the events that it waits for; called after each use of it."""
        if link.broken is not None:
            self._drop(link)
        elif link.fileno() in self._held.links:
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
            # It may have ended before it answered, or had too many strangers: a living rank can be reached again.
            if link.reached and self._called_again < _CALLS_AGAIN:
                self._called_again += 1
                self._addresses = self._in_order(self._above_card)
            self._connect(refused=self._called_again > 0 and not link.reached)


_alive: weakref.WeakSet[Peers] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close connections in a forked child: kept open, they would show other ranks that its parent lives."""
    for peers in list(_alive):
        peers.close()


os.register_at_fork(after_in_child=_close_in_child)

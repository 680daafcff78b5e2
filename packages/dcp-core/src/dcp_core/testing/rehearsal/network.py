"""The ranks' store and connections in virtual time: latencies, one server, a network card per host, deaths."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from dcp_core.testing.rehearsal.clock import Clock, Resource
from dcp_ranks.options import PeerOptions
from dcp_ranks.peers.monitor import Peers
from dcp_ranks.peers.roster import Card, ProcessIdentity
from dcp_ranks.phases.leaders import Relays
from dcp_ranks.transport.connection import Frame, Mail
from dcp_ranks.transport.store_wire import KeyValueStore

__all__ = ["Network", "Traffic", "VirtualPeers", "VirtualRelays"]

_FRAME_BYTES = 25
_ENDED = "its process has ended"
_LEAST_SECONDS = 1e-6  # time must pass, or a rank that asks again and again would stop it
_DEATH_SECONDS = 0.001  # until the kernel reports the end of a process of the same host, or a closed connection


@dataclass(slots=True)
class Traffic:
    """What one rank has sent: requests to the store without polls, polls, bytes set there, and frames."""

    requests: int = 0
    deletions: int = 0
    polls: int = 0
    set_bytes: int = 0
    frames: int = 0
    frame_bytes: int = 0


@dataclass(slots=True)
class Network:
    """Hosts of equal size, a store server, and the ranks' monitors.

    Seconds are one way; rates are of one network card and of the server.
    """

    clock: Clock
    world_size: int
    ranks_per_host: int
    store_seconds: float
    requests_per_second: float
    link_seconds: float
    nic_bytes_per_second: float
    options: PeerOptions
    keys: dict[str, bytes] = field(default_factory=dict)
    server: Resource = field(default_factory=Resource)
    server_nic: Resource = field(default_factory=Resource)
    nics: dict[int, Resource] = field(default_factory=dict)
    traffic: list[Traffic] = field(default_factory=list)
    peers: dict[int, VirtualPeers] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    store_lost: bool = False
    below: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nics = {host: Resource() for host in range(self.host(self.world_size - 1) + 1)}
        self.traffic = [Traffic() for _ in range(self.world_size)]
        for rank in range(1, self.world_size):
            self.below.setdefault(self.above(rank) or 0, []).append(rank)

    def host(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def connect(self, rank: int) -> VirtualPeers:
        """Return a rank's monitor, with leaders in large groups."""
        kind = VirtualRelays if self.world_size > self.options.leaders_above else VirtualPeers
        return self.peers.setdefault(rank, kind(self, rank))

    def above(self, rank: int) -> int | None:
        """Return the rank directly above in the tree; None for rank 0."""
        host, leader = self.host(rank), self.host(rank) * self.ranks_per_host
        if rank == 0 or self.world_size <= self.options.leaders_above:
            return 0 if rank else None
        if rank != leader:
            return leader
        return max(0, host // self.options.fan_out - 1) * self.ranks_per_host

    def most_links(self) -> int:
        """Return the connections between ranks of the rank that has most."""
        if self.world_size <= self.options.leaders_above:
            return max(0, self.world_size - self.ranks_per_host)
        return max(len(ranks) + (rank > 0) for rank, ranks in self.below.items())

    def kill(self, ranks: Iterable[int], how: str = _ENDED, *, seconds: float = _DEATH_SECONDS) -> None:
        """Kill processes; the ranks that watch them notice after `seconds`."""
        for rank in ranks:
            self.dead.add(rank)
            self.clock.kill(self.clock.tasks[rank])
            self.clock.at(self.clock.now + seconds, partial(self._report, rank, how))

    def _report(self, rank: int, how: str) -> None:
        # As in `Peers`: the ranks of the same host, and both ends of each connection.
        first = self.host(rank) * self.ranks_per_host
        watching = {*range(first, first + self.ranks_per_host), self.above(rank), *self.below.get(rank, ())}
        for other in sorted(watching & self.peers.keys() - self.dead, key=str):
            self.peers[other].lose(rank, how)

    def lose_store(self) -> None:
        self.store_lost = True


class _Store(KeyValueStore):
    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank

    def _ask(self, answer: Callable[[dict[str, bytes]], Any], sent_bytes: int = 0, *, checks: bool = False) -> Any:
        network, clock, count = self._network, self._network.clock, self._network.traffic[self._rank]
        count.polls += checks
        count.requests += not checks
        count.set_bytes += sent_bytes
        found: list[Any] = []

        def moments() -> Iterator[float]:
            seconds = sent_bytes / network.nic_bytes_per_second
            sent = network.nics[network.host(self._rank)].take(clock.now, seconds)
            came = network.server_nic.take(sent + network.store_seconds, seconds)
            yield network.server.take(came, 1 / network.requests_per_second)
            if not network.store_lost:
                found.append(answer(network.keys))
                end = clock.now
                if isinstance(found[0], bytes):
                    end = network.server_nic.take(end, len(found[0]) / network.nic_bytes_per_second)
                yield end + network.store_seconds

        clock.play(moments())
        if not found:
            raise RuntimeError("Connection reset by peer")
        return found[0]

    def set(self, key: str, value: bytes, /) -> None:
        self._ask(lambda keys: keys.__setitem__(key, bytes(value)), len(value))

    def add(self, key: str, amount: int, /) -> int:
        def answer(keys: dict[str, bytes]) -> int:
            keys[key] = b"%d" % (int(keys.get(key, b"0")) + amount)
            return int(keys[key])

        return int(self._ask(answer))

    def check(self, keys: list[str], /) -> bool:
        return bool(self._ask(lambda found: all(key in found for key in keys), checks=True))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        def answer(keys: dict[str, bytes]) -> bytes:
            if keys.get(key, b"" if not expected else None) == expected.encode():
                keys[key] = desired.encode()
            return keys.get(key, expected.encode())

        return bytes(self._ask(answer))

    def delete_key(self, key: str, /) -> bool:
        self._network.traffic[self._rank].deletions += 1
        return bool(self._ask(lambda keys: keys.pop(key, None) is not None))

    def clone(self) -> KeyValueStore:
        return self

    def set_timeout(self, limit: timedelta, /) -> None:
        del limit


class VirtualPeers(Peers):
    """A rank's monitor: deaths arrive as events instead of over sockets and process descriptors."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank
        self.lost = {}
        self.task = network.clock.task
        self.store = _Store(network, rank)

    def lose(self, rank: int, how: str) -> None:
        self._lose(rank, how)
        self.wake()

    def wake(self) -> None:
        if self.task is not None:
            self._network.clock.wake(self.task)

    def pause(self, seconds: float, store: KeyValueStore | None = None) -> None:
        del store
        self._network.clock.wait(max(seconds, _LEAST_SECONDS))

    def meet(self, store: KeyValueStore, *, complete: bool = True) -> None:
        pass

    def host_names(self, store: KeyValueStore, ranks: Iterable[int]) -> dict[int, str]:
        del store
        return {rank: f"host-{self._network.host(rank)}" for rank in ranks}


class _Link:
    broken = None

    def __init__(self, network: Network, sender: int, rank: int) -> None:
        self._network, self._sender, self.rank = network, sender, rank
        self._sent_at = 0.0

    @property
    def sending(self) -> bool:
        return self._network.clock.now < self._sent_at

    def send(self, frame: Frame) -> None:
        network, clock = self._network, self._network.clock
        if self._sender in network.dead:
            return
        size = len(frame.body) + _FRAME_BYTES
        count = network.traffic[self._sender]
        count.frames += 1
        count.frame_bytes += size
        seconds = size / network.nic_bytes_per_second
        here, there = network.host(self._sender), network.host(self.rank)
        self._sent_at = clock.now if here == there else network.nics[here].take(clock.now, seconds)
        came = self._sent_at + network.link_seconds
        if here != there:
            came = network.nics[there].take(came, seconds)
        clock.at(came, lambda: self._deliver(frame))

    def _deliver(self, frame: Frame) -> None:
        peers = self._network.peers.get(self.rank)
        if isinstance(peers, VirtualRelays):
            peers.arrived.append((self._sender, frame))
            peers.wake()
        else:  # the other rank connects later
            self._network.clock.at(self._network.clock.now + 0.01, lambda: self._deliver(frame))


class VirtualRelays(VirtualPeers, Relays):
    """`VirtualPeers` whose frames take the virtual network."""

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__(network, rank)
        self._mail, self._lock = Mail(), threading.RLock()
        self._begun, self._first = {}, {}
        self._prefix, self._world_size = "dcp/peers/0/", network.world_size
        self.arrived: list[tuple[int, Frame]] = []
        above = network.above(rank)
        self._above_card = None if above is None else Card(above, ProcessIdentity("", 0, 0))
        self._above: Any = None if above is None else _Link(network, rank, above)
        self._below: Any = {other: _Link(network, rank, other) for other in network.below.get(rank, ())}

    def lose(self, rank: int, how: str) -> None:
        self._below.pop(rank, None)
        if self._above is not None and self._above.rank == rank:
            self._above = None
        super().lose(rank, how)

    def pause(self, seconds: float, store: KeyValueStore | None = None) -> None:
        if not self.arrived:
            super().pause(seconds, store)
        arrived, self.arrived = self.arrived, []
        for sender, frame in arrived:
            link = self._above if self._above is not None and self._above.rank == sender else self._below.get(sender)
            if link is not None:
                self._sort(link, frame)

    def _send(self, link: Any, *frames: Frame) -> None:
        for frame in frames:
            link.send(frame)

"""`Topology`: the links between hosts; `Roles`: what one rank does with the pieces of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_exchange.assignment.assign import Assignment
from dcp_exchange.holders import Holders

# Hosts of a job in which every host may be linked to every other one.
MOST_LINKED_HOSTS = 32
# What a process may have beside the links of a large job: sockets to the ranks of its host.
SPARE_SOCKETS = 16


@dataclass(frozen=True, slots=True)
class Topology:
    """Links between the hosts of a job, equal on all ranks.

    In a small job each pair of hosts has a link. In a larger job, two hosts have a link if their numbers differ by a
    power of two, counted round the circle. Bytes reach all other hosts in at most log₂(hosts) steps.

    Attributes:
        members: Ascending ranks per host; hosts are numbered in the order of their lowest ranks.
        hosts: Number of the host, per rank.
        direct: Whether each pair of hosts has a link.

    Source: the fingers of Chord (Stoica et al., 2001), in both directions.
    """

    members: tuple[tuple[int, ...], ...]
    hosts: tuple[int, ...]
    direct: bool

    @classmethod
    def of(cls, hosts: Sequence[int]) -> Topology:
        """Return the topology from the host per rank, as any number."""
        found: dict[int, list[int]] = {}
        for rank, host in enumerate(hosts):
            found.setdefault(host, []).append(rank)
        numbers = {host: number for number, host in enumerate(found)}
        count = len(found)
        fewest = min(map(len, found.values()), default=1)
        links = -(-(count - 1) // fewest)
        spare = SPARE_SOCKETS + 2 * max(count - 1, 0).bit_length() - (fewest - 1)
        return cls(
            tuple(map(tuple, found.values())),
            tuple(numbers[host] for host in hosts),
            count <= MOST_LINKED_HOSTS and links <= spare,
        )

    def neighbours(self, host: int) -> tuple[int, ...]:
        """Return the linked hosts, ascending round the circle."""
        return tuple((host + step) % len(self.members) for step in self._steps())

    def keeper(self, host: int, other: int) -> int:
        """Return the rank that keeps a host's link to another host; ValueError without a link."""
        steps = self._steps()
        step = (other - host) % len(self.members)
        if step not in steps:
            raise ValueError(f"host {host} of {len(self.members)} has no link to host {other}")
        members = self.members[host]
        return members[steps.index(step) % len(members)]

    def links(self, rank: int) -> list[tuple[int, int]]:
        """Return the other hosts to which a rank keeps links, with the rank at the other end."""
        host = self.hosts[rank]
        kept = [other for other in self.neighbours(host) if self.keeper(host, other) == rank]
        return [(other, self.keeper(other, host)) for other in kept]

    def tree(self, source: int, receivers: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Return the linked hosts to which each host forwards bytes; each receiving host gets them once.

        Other hosts in a large job may forward bytes that they do not want.
        """
        count = len(self.members)
        others = sorted({(host - source) % count for host in receivers} - {0})
        if self.direct:
            return {source: tuple((source + step) % count for step in others)} if others else {}
        found: dict[int, tuple[int, ...]] = {}
        forwards = [step for step in others if step <= count // 2]
        backwards = [count - step for step in others if step > count // 2]
        waiting = [(source, 1, forwards), (source, -1, backwards)]
        for host, direction, steps in waiting:
            by_finger: dict[int, list[int]] = {}
            for step in steps:
                finger = 1 << step.bit_length() - 1
                by_finger.setdefault(finger, []).append(step - finger)
            for finger, rest in sorted(by_finger.items()):
                following = (host + direction * finger) % count
                found[host] = (*found.get(host, ()), following)
                waiting.append((following, direction, [step for step in rest if step]))
        return found

    def _steps(self) -> list[int]:
        count = len(self.members)
        if self.direct:
            return [*range(1, count)]
        fingers = [1 << power for power in range((count // 2).bit_length())]
        return sorted({*fingers, *(count - finger for finger in fingers)})


@dataclass(frozen=True, slots=True)
class Plan:
    """The coordinator's decision, equal on all ranks. `holders` is None if every rank can read all objects."""

    assignment: Assignment
    topology: Topology
    holders: Holders | None = None


class Roles:
    """The part of one rank in a plan."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._rank = rank
        self._topology = plan.topology
        self.host = plan.topology.hosts[rank]
        self.neighbours = [other for other in plan.topology.members[self.host] if other != rank]
        self.distant = dict(plan.topology.links(rank))
        """Host → its rank to which this rank keeps the link."""
        pieces = plan.assignment
        self._readers = [
            pieces.readers[start:stop].tolist() for start, stop in itertools.pairwise(pieces.borders.tolist())
        ]
        mine = np.flatnonzero(pieces.readers == rank)
        self._wanted = set((np.searchsorted(pieces.borders, mine, "right") - 1).tolist())
        self._known: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    def wants(self, of_class: int) -> bool:
        """Return whether this rank wants the pieces of a class."""
        return of_class in self._wanted

    def users(self, of_class: int, origin: int) -> list[int]:
        """Return the other ranks of this host that need a piece in this rank's arena."""
        return self._find(of_class, origin)[0]

    def onward(self, of_class: int, origin: int) -> list[int]:
        """Return the hosts to which this rank sends a piece."""
        return self._find(of_class, origin)[1]

    @property
    def lanes(self) -> int:
        """Number of lanes on which pieces arrive from other hosts."""
        if not self.distant:
            return 0
        return 1 if self._topology.direct else len(self._topology.members).bit_length()

    def lane(self, sender: int) -> int:
        """Return the lane of a link from a rank of another host, from 0 on.

        A forwarded piece arrives on ever lower lanes, each with its own memory, so hosts that wait for room never form
        a circle.
        """
        if self._topology.direct:
            return 0
        distance = abs(self._topology.hosts[sender] - self.host)
        return min(distance, len(self._topology.members) - distance).bit_length() - 1

    def _find(self, of_class: int, origin: int) -> tuple[list[int], list[int]]:
        key = of_class, origin
        if key not in self._known:
            topology, readers = self._topology, self._readers[of_class]
            tree = topology.tree(origin, {topology.hosts[rank] for rank in readers})
            keepers = {other: topology.keeper(self.host, other) for other in tree.get(self.host, ())}
            here = {rank for rank in readers if topology.hosts[rank] == self.host} | {*keepers.values()}
            onward = [other for other, keeper in keepers.items() if keeper == self._rank]
            self._known[key] = sorted(here - {self._rank}), onward
        return self._known[key]

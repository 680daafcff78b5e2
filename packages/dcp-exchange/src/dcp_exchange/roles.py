"""`Roles`: what one rank does with each piece: take it, pass it on within its host, or send it to another host."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from dcp_exchange.assignment.assignment import Assignment
from dcp_exchange.holders import Holders
from dcp_exchange.topology import Topology

__all__ = ["Plan", "Roles"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coordinator has decided, the same on all ranks: who reads and wants each piece, and hosts' links.

    Attributes:
        assignment: Who reads and wants each piece.
        topology: Links between the hosts.
        holders: Hosts that have each object; None if every rank can read all.
    """

    assignment: Assignment
    topology: Topology
    holders: Holders | None = None


class Roles:
    """The part of one rank in a plan.

    Args:
        plan: The plan.
        rank: The rank.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._rank = rank
        self._topology = plan.topology
        self.host = plan.topology.hosts[rank]
        """Number of this rank's host."""
        self.neighbours = [other for other in plan.topology.members[self.host] if other != rank]
        """The other ranks of this host."""
        self.distant = dict(plan.topology.links(rank))
        """Number of another host → rank of it to which this rank keeps the link."""
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
        """Return the other ranks of this host that need a piece which this rank has put into its arena.

        Args:
            of_class: Class of the piece.
            origin: Number of the host on which the piece was read.
        """
        return self._find(of_class, origin)[0]

    def onward(self, of_class: int, origin: int) -> list[int]:
        """Return the numbers of the hosts to which this rank sends a piece; arguments as for `users`."""
        return self._find(of_class, origin)[1]

    @property
    def lanes(self) -> int:
        """Number of lanes on which pieces arrive from other hosts; see `lane`."""
        if not self.distant:
            return 0
        return 1 if self._topology.direct else len(self._topology.members).bit_length()

    def lane(self, sender: int) -> int:
        """Return the lane of a link from a rank of another host, from 0 on.

        A piece that is passed on arrives on ever lower lanes. With memory reserved for each lane, hosts that wait for
        room at each other never form a circle.
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

"""`Roles`: what one rank does with each piece: take it, pass it on within its host, or send it to another host."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dcp_exchange.assignment.assignment import Assignment

__all__ = ["Plan", "Roles"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coordinator has decided, the same on all ranks.

    Attributes:
        assignment: The pieces, who reads each, and who wants it.
        hosts: Ranks of each host, ascending; each rank is in one host.
    """

    assignment: Assignment
    hosts: tuple[tuple[int, ...], ...]


class Roles:
    """The part of one rank in a plan. Between two hosts there is one connection, kept by one rank of each.

    Args:
        plan: The plan.
        rank: The rank.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._rank = rank
        self._hosts = plan.hosts
        self.host_of = {member: number for number, host in enumerate(plan.hosts) for member in host}
        """Rank → number of its host."""
        self.host = self.host_of[rank]
        """Number of this rank's host."""
        pieces = plan.assignment
        borders = pieces.borders.tolist()
        self._readers = [pieces.readers[start:stop].tolist() for start, stop in itertools.pairwise(borders)]
        mine = np.flatnonzero(pieces.readers == rank)
        self._wanted = set((np.searchsorted(pieces.borders, mine, "right") - 1).tolist())
        self._known: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    @property
    def neighbours(self) -> list[int]:
        """The other ranks of this host."""
        return [rank for rank in self._hosts[self.host] if rank != self._rank]

    @cached_property
    def distant(self) -> dict[int, int]:
        """Number of another host → rank of it to which this rank keeps the connection; without those of neighbours."""
        others = (number for number in range(len(self._hosts)) if number != self.host)
        return {number: self.door(number, self.host) for number in others if self.door(self.host, number) == self._rank}

    def door(self, host: int, towards: int) -> int:
        """Return the rank of a host that keeps its connection to another host."""
        members = self._hosts[host]
        return members[towards % len(members)]

    def wants(self, of_class: int) -> bool:
        """Whether this rank wants the pieces of a class."""
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

    def _find(self, of_class: int, origin: int) -> tuple[list[int], list[int]]:
        key = of_class, origin
        if key not in self._known:
            readers = self._readers[of_class]
            targets = sorted({self.host_of[rank] for rank in readers} - {origin}) if origin == self.host else []
            here = {rank for rank in readers if self.host_of[rank] == self.host}
            here |= {self.door(self.host, target) for target in targets}
            onward = [target for target in targets if self.door(self.host, target) == self._rank]
            self._known[key] = sorted(here - {self._rank}), onward
        return self._known[key]

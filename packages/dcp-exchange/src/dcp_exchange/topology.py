"""`Topology`: which hosts have links, which rank keeps each link, and by which hosts bytes are passed on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = ["Topology"]

# Hosts of a job in which every host may be linked to every other one.
MOST_LINKED_HOSTS = 32
# What a process may have beside the links of a large job: sockets to the ranks of its host.
SPARE_SOCKETS = 16


@dataclass(frozen=True, slots=True)
class Topology:
    """Links between the hosts of a job; the same on all ranks, from the same hosts.

    In a small job each pair of hosts has a link. In a larger one a host is linked to those whose number differs by a
    power of two, counted round the circle of all hosts, and bytes reach the others in at most log₂(hosts) steps.

    Attributes:
        members: The ranks of each host, ascending; hosts are numbered in the order of their lowest ranks.
        hosts: Number of each rank's host.
        direct: Whether each pair of hosts has a link.

    Source: the fingers of Chord (Stoica et al., 2001), in both directions.
    """

    members: tuple[tuple[int, ...], ...]
    hosts: tuple[int, ...]
    direct: bool

    @classmethod
    def of(cls, hosts: Sequence[int]) -> Topology:
        """Return the topology of a job.

        Args:
            hosts: Host of each rank, as any number.
        """
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
        """Return the hosts that a host is linked to, ascending round the circle from the host on."""
        return tuple((host + step) % len(self.members) for step in self._steps())

    def keeper(self, host: int, other: int) -> int:
        """Return the rank of a host that keeps its link to another host; links are spread over the host's ranks.

        Raises:
            ValueError: The hosts have no link.
        """
        steps = self._steps()
        step = (other - host) % len(self.members)
        if step not in steps:
            raise ValueError(f"host {host} of {len(self.members)} has no link to host {other}")
        members = self.members[host]
        return members[steps.index(step) % len(members)]

    def links(self, rank: int) -> list[tuple[int, int]]:
        """Return the other hosts to which a rank keeps links, each with the rank that keeps it there."""
        host = self.hosts[rank]
        kept = [other for other in self.neighbours(host) if self.keeper(host, other) == rank]
        return [(other, self.keeper(other, host)) for other in kept]

    def count_sockets(self, rank: int) -> int:
        """Return the number of sockets of a rank: to the other ranks of its host, and to other hosts."""
        return len(self.members[self.hosts[rank]]) - 1 + len(self.links(rank))

    def tree(self, source: int, receivers: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Return to which linked hosts each host passes on what is sent from one host to several.

        Each receiving host gets it exactly once, and no host twice. In a large job hosts may pass on what they do not
        want: never where all hosts are receivers.

        Args:
            source: Host that has the bytes.
            receivers: Hosts that are to get them; the source itself is left out.

        Returns:
            Host → next hosts, for each host that passes something on.
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
        """Distances round the circle at which hosts are linked, ascending."""
        count = len(self.members)
        if self.direct:
            return [*range(1, count)]
        fingers = [1 << power for power in range((count // 2).bit_length())]
        return sorted({*fingers, *(count - finger for finger in fingers)})

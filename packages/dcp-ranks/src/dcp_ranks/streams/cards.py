"""`StreamCard`: addresses of a rank's listening sockets."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dcp_ranks.peers.roster import own_identity

Place = tuple[str, int]
"""(name, -1) of an abstract Unix socket, or (IP address, port)."""

LOCAL_PORT = -1


@dataclass(frozen=True, slots=True)
class StreamCard:
    """A rank's listening sockets, for the other ranks of an operation; small, and supports pickling.

    Attributes:
        rank: Rank within the group.
        host: Text that is equal on ranks of one host, and may be equal on others: a hint only.
        local: Name of an abstract Unix socket, or empty.
        addresses: IP addresses, the most probable first.
        port: TCP port at all addresses.
        challenge: Random bytes that a connecting rank authenticates with the job's secret.
    """

    rank: int
    host: str
    local: str
    addresses: tuple[str, ...]
    port: int
    challenge: bytes = field(repr=False)


def host_hint() -> str:
    """Return the boot id: a hint that two ranks share a host, not a proof."""
    return own_identity().host.partition(" ")[0]


def places_of(card: StreamCard, own_host: str) -> Sequence[Place]:
    """Return addresses, the most probable first: the Unix socket if the rank may be on this host."""
    near = card.host == own_host
    addresses = sorted(card.addresses, key=lambda address: ipaddress.ip_address(address).is_loopback != near)
    local = [(card.local, LOCAL_PORT)] if near and card.local else []
    return [*local, *((address, card.port) for address in addresses)]


def group_by_host(proved: Mapping[int, Collection[int]]) -> tuple[tuple[int, ...], ...]:
    """Group ranks into hosts: within a group, all ranks have proved to each other that they share a host.

    If proofs are not transitive (0 with 1, 1 with 2, not 0 with 2), a rank joins the first group in which it has a
    proof with every rank, or starts a new one.

    Args:
        proved: Rank → ranks that proved to be on its host (`Stream.same_host`), with or without itself; all ranks are
            keys. Both ranks must report a proof.

    Returns:
        The groups in the order of their lowest ranks, with ascending ranks; each rank is in one group.

    Example:
        ```python
        from dcp_ranks import group_by_host

        assert group_by_host({0: [1], 1: [0], 2: [3], 3: [2], 4: [3]}) == ((0, 1), (2, 3), (4,))
        ```
    """
    sets = {rank: frozenset(others) for rank, others in proved.items()}
    hosts: list[list[int]] = []
    for rank in sorted(sets):
        for host in hosts:
            if all(other in sets[rank] and rank in sets[other] for other in host):
                host.append(rank)
                break
        else:
            hosts.append([rank])
    return tuple(tuple(host) for host in hosts)

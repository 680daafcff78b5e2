"""`StreamCard`, the record by which other ranks find a rank's listening sockets, and the order in which to try them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from dcp_ranks.peers.process_identity import own_identity

__all__ = ["Place", "StreamCard", "host_hint", "places_of"]

Place = tuple[str, int]
"""Address to connect to: (name, -1) of an abstract Unix socket, or (IP address, port)."""

LOCAL_PORT = -1


@dataclass(frozen=True, slots=True)
class StreamCard:
    """Record of one rank's listening sockets, for the other ranks of an operation; small, and supports pickling.

    Attributes:
        rank: Rank within the group.
        host: Text that is equal on ranks of one host, and may be equal on others: a hint, which proves nothing.
        local: Name of an abstract Unix socket; empty if there is none.
        addresses: IP addresses, the most probable first.
        port: TCP port at all of these addresses.
        challenge: Random bytes that a connecting rank must authenticate with the secret of the job.
    """

    rank: int
    host: str
    local: str
    addresses: tuple[str, ...]
    port: int
    challenge: bytes = field(repr=False)


def host_hint() -> str:
    """Return the boot id of this machine: a hint that two ranks may be of one host, never a proof."""
    return own_identity().host.partition(" ")[0]


def places_of(card: StreamCard, own_host: str) -> Sequence[Place]:
    """Return where to connect to a rank, the most probable place first: its Unix socket if it may be of this host.

    Args:
        card: Card of the other rank.
        own_host: `host_hint` of this rank.
    """
    near = card.host == own_host
    addresses = sorted(card.addresses, key=lambda address: ipaddress.ip_address(address).is_loopback != near)
    local = [(card.local, LOCAL_PORT)] if near and card.local else []
    return [*local, *((address, card.port) for address in addresses)]

"""Listening sockets of a rank, on addresses in the network of the store or in a given network.

Not in this module: the connections themselves.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from dcp_ranks.transport.connection import listen, own_addresses
from dcp_ranks.transport.store_address import innermost_store

__all__ = ["addresses_to_announce", "open_doors"]

_LOOPBACK = "127.0.0.1"
_MAX_DOORS = 16


def addresses_to_announce(store: Any, network: str | None) -> list[str]:
    """Return the addresses of this host at which other ranks can probably connect, the most probable first.

    Args:
        store: Store of the process group.
        network: IP network such as `10.0.0.0/8`; None for the network of the store.

    Returns:
        With `network`, the addresses of this host in that network; empty if there is none, in which case no rank can
        connect to this rank. Without it, the address from which this host reaches the store; all addresses of this host
        if the store has no server or the server's name resolves to a loopback address.
    """
    own = own_addresses()
    if network is not None:
        wanted = ipaddress.ip_network(network, strict=False)
        return [address for address in own if ipaddress.ip_address(address) in wanted]
    host, port = _server(store)
    source = _source_towards(host, port) if host else None
    if source is None or (_is_loopback(source) and not _says_loopback(host)):
        return own
    return [source]


def open_doors(
    addresses: Iterable[str], ports: tuple[int, int] | None = None
) -> tuple[list[socket.socket], tuple[str, ...], int]:
    """Open a listening socket on each address, all on the same free port.

    Args:
        addresses: IP addresses.
        ports: First and last port to choose from; None for all.

    Returns:
        The sockets that could be opened, their addresses, and the port (0 if no socket could be opened).
    """
    doors: list[socket.socket] = []
    announced: list[str] = []
    choices: Sequence[int] = (0,) if ports is None else range(ports[0], ports[1] + 1)
    for address in addresses:
        if len(doors) < _MAX_DOORS and (door := _listen_on_one(address, choices)) is not None:
            doors.append(door)
            announced.append(address)
            choices = (doors[0].getsockname()[1],)
    return doors, tuple(announced), choices[0] if doors else 0


def _listen_on_one(address: str, ports: Sequence[int]) -> socket.socket | None:
    """Listen on the first of some ports that is free; returns None if none is, or the address is not of this host."""
    for port in ports:
        with contextlib.suppress(OSError):
            return listen(address, port)
    return None


def _server(store: Any) -> tuple[str, int]:
    """Return host and port of the server of a store; an empty host if it has none."""
    inner = innermost_store(store)
    try:
        return str(inner.host), int(inner.port)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # files, memory, stores of others
        return "", 0


def _source_towards(host: str, port: int) -> str | None:
    """Return this host's source address towards another host; sends nothing. None if there is no route."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                found = str(probe.getsockname()[0]).partition("%")[0]
                return _LOOPBACK if _is_loopback(found) else found
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _says_loopback(host: str) -> bool:
    """Whether a host name means each host itself, wherever it is looked up."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"

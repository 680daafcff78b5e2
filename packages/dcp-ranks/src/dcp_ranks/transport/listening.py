"""Listening sockets of a rank, and how two ranks of one job authenticate each other over a new TCP connection.

The listener publishes a challenge in the store. The caller sends a random number with an HMAC of both numbers under
a shared secret, and the listener answers with another HMAC. Later messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from dcp_ranks.transport.store_wire import innermost_store

_LOOPBACK = "127.0.0.1"
_MAX_DOORS = 16
_NONCE_BYTES = 32

MAX_GUESTS = 32
"""Most unauthenticated connections; beyond it the oldest is closed, and may connect again."""
GUEST_TIMEOUT_SECONDS = 10.0
CONNECT_TIMEOUT_SECONDS = 3.0
"""Limit for one address: the cost of a firewall that drops packets."""
_ACCEPTED_AT_ONCE = 64

Guest = TypeVar("Guest")


def addresses_to_announce(store: Any, network: str | None) -> list[str]:
    """Return this host's addresses at which other ranks can probably connect, the most probable first.

    With `network`, only addresses in it, possibly none. Otherwise the address from which this host reaches the store,
    or all addresses if the store has no server or its name resolves to loopback.
    """
    own = own_addresses()
    if network is not None:
        wanted = ipaddress.ip_network(network, strict=False)
        return [address for address in own if ipaddress.ip_address(address) in wanted]
    server = innermost_store(store)
    try:
        host, port = str(server.host), int(server.port)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # a file, memory or custom store
        return own
    source = _source_towards(host, port)
    is_own_name = host in ("localhost", "::1") or host.startswith("127.")  # for each host itself
    if source is None or (ipaddress.ip_address(source).is_loopback and not is_own_name):
        return own
    return [source]


def own_addresses() -> list[str]:
    """Return this host's IP addresses, loopback last, without slow name look-ups."""
    found: dict[str, None] = {}
    last = ""
    with contextlib.suppress(OSError):  # a line after each address marks the local ones
        for line in Path("/proc/net/fib_trie").read_text().splitlines():
            if "|--" in line:
                last = line.split()[-1]
            elif "/32 host LOCAL" in line and not last.startswith("127."):
                found[last] = None
    with contextlib.suppress(OSError):  # address, index, prefix length, scope, flags, name
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, *_ = line.split()
            if scope == "00":
                found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = None
    return [*found, _LOOPBACK]


def open_doors(
    addresses: Iterable[str], ports: tuple[int, int] | None = None
) -> tuple[list[socket.socket], tuple[str, ...], int]:
    """Open listening sockets; return sockets, addresses and their common port (0 if none opened)."""
    doors: list[socket.socket] = []
    announced: list[str] = []
    choices: Sequence[int] = (0,) if ports is None else range(ports[0], ports[1] + 1)
    for address in addresses:
        if len(doors) < _MAX_DOORS and (door := listen(address, choices)) is not None:
            doors.append(door)
            announced.append(address)
            choices = (doors[0].getsockname()[1],)
    return doors, tuple(announced), choices[0] if doors else 0


def listen(address: str = _LOOPBACK, ports: Sequence[int] = (0,)) -> socket.socket | None:
    """Return a non-blocking listening socket on the first free port (0: any), or None."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        with contextlib.suppress(OSError):
            made = socket.create_server((address, port), family=family, backlog=4096, reuse_port=False)
            made.setblocking(False)
            return made
    return None


class Call:
    """The connecting side of one handshake."""

    def __init__(self, secret: bytes, challenge: bytes, rank: int) -> None:
        self._secret = secret
        self._parts = (challenge, os.urandom(_NONCE_BYTES), rank)

    @property
    def hello(self) -> bytes:
        """First bytes to send."""
        return self._parts[1] + _code(self._secret, b"call", *self._parts)

    def is_answered_by(self, welcome: bytes | bytearray) -> bool:
        """Return whether the listener has proved that it knows the secret."""
        return hmac.compare_digest(welcome, _code(self._secret, b"answer", *self._parts))


class Listener:
    """The listening side, for all connections."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.challenge = os.urandom(_NONCE_BYTES)
        """To be published."""
        self._used: set[bytes] = set()

    def answer(self, hello: bytes | bytearray, rank: int) -> bytes | None:
        """Return the answer for a caller that claims `rank`; None if `hello` is not authentic or is a replay."""
        nonce, code = bytes(hello[:_NONCE_BYTES]), hello[_NONCE_BYTES:]
        parts = (self.challenge, nonce, rank)
        if not hmac.compare_digest(code, _code(self._secret, b"call", *parts)) or nonce in self._used:
            return None
        self._used.add(nonce)  # only callers that know the secret get here, so the set stays small
        return _code(self._secret, b"answer", *parts)


class Guests(Generic[Guest]):
    """Unauthenticated connections; `receive` wraps each new socket."""

    def __init__(self, receive: Callable[[socket.socket], Guest]) -> None:
        self._receive = receive
        self.waiting: dict[Guest, float] = {}
        """By time of arrival."""

    def accept(self, door: socket.socket) -> Iterator[Guest]:
        """Yield accepted connections, at most 64 per call. Raises OSError if the process has no descriptor left."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = door.accept()
            except OSError as error:  # no connection waits, or it is gone again
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                return
            guest = self._receive(connection)
            self.waiting[guest] = time.monotonic()
            yield guest

    def forget(self, guest: Guest) -> None:
        """Remove an authenticated or closed connection."""
        self.waiting.pop(guest, None)

    def unwelcome(self) -> list[Guest]:
        """Return the connections to close: unauthenticated for 10 s, or the oldest beyond the limit."""
        before = time.monotonic() - GUEST_TIMEOUT_SECONDS
        late = [guest for guest, came in self.waiting.items() if came < before]
        return late or [*self.waiting][: max(0, len(self.waiting) - MAX_GUESTS)]


def _code(secret: bytes, role: bytes, challenge: bytes, nonce: bytes, rank: int) -> bytes:
    parts = (b"dcp rank", role, challenge, nonce, str(rank).encode())
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "little") + part for part in parts), "sha256")


def _source_towards(host: str, port: int) -> str | None:
    """Return this host's source address, found without sending; None without a route."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                found = str(probe.getsockname()[0]).partition("%")[0]
                return _LOOPBACK if ipaddress.ip_address(found).is_loopback else found
    return None

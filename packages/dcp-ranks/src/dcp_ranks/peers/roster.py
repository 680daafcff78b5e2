"""Identities of the ranks' processes, and their cards in the store, from which follows the tree of all ranks.

Keys under `dcp/peers/<sequence>/`, never deleted: `token` (the job's secret), `root` (the coordinator's card),
`host/<host>` (number of a host's cards), `hosts` (number of hosts), `host/<host>/<n>` (its cards), `hosts/<n>` (cards
of leaders), `name/<rank>` (name of a rank's host), `first/<series>` (first operation).

Source: Linux `pidfd_open(2)`, `proc_pid_stat(5)` (starttime), `random(4)` (boot_id), `pid_namespaces(7)`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import uuid
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace

from dcp_ranks.transport.store_wire import StoreWire, decode, encode

_START_FIELD = 19  # field of /proc/<pid>/stat, counted after the process's name


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Unique identity of a process in a cluster.

    `host` is boot id and pid namespace: processes with the same `host` see each other's pids. `started`, in clock ticks
    since the boot, tells apart processes with the same pid.
    """

    host: str
    pid: int
    started: int


def own_identity() -> ProcessIdentity:
    """Return this process's identity, also after a fork; its host is unlike all others if it cannot watch processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
        identity = ProcessIdentity(host, os.getpid(), _start_of(os.getpid()))
    except (OSError, ValueError, IndexError):  # not Linux: counts as the only rank on its machine
        return ProcessIdentity(f"unknown {uuid.uuid4().hex}", os.getpid(), 0)
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return replace(identity, host=f"{host} {uuid.uuid4().hex}")
    return identity


def watch_process(process: ProcessIdentity, own_host: str) -> int | None:
    """Open a pidfd, which becomes readable when the process ends; the caller must close it.

    Return None for another machine or container than `own_host`, or if the kernel lacks pidfd. Raise
    ProcessLookupError if the process has ended.
    """
    if process.host != own_host or not hasattr(os, "pidfd_open"):
        return None
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise
    except OSError:  # a sandbox refuses the call, or no descriptor is left
        return None
    # The descriptor holds the process that has the pid now; only then can its identity be checked.
    with contextlib.suppress(OSError, ValueError, IndexError):
        if _start_of(process.pid) == process.started:
            return descriptor
    os.close(descriptor)
    raise ProcessLookupError(process.pid)


@dataclass(frozen=True, slots=True)
class Card:
    """One rank's process, and the addresses on which it listens."""

    rank: int
    process: ProcessIdentity
    addresses: tuple[str, ...] = ()
    port: int = 0
    challenge: bytes = b""
    """Random bytes for `Listener`."""


class CardBox:
    """Read and write the cards of a group's ranks in the store.

    With `fan_out`, each rank is below its host's leader, and at most `fan_out` leaders below each leader and the
    coordinator. With None, all ranks are directly below the coordinator.
    """

    def __init__(self, wire: StoreWire, process: ProcessIdentity, fan_out: int | None) -> None:
        self._process = process
        self._fan_out = fan_out
        self._host = f"host/{hashlib.sha256(process.host.encode()).hexdigest()[:16]}"
        self._leader_number: int | None = None
        self.secret = wire.claim("token", secrets.token_hex(32)).encode()
        """Secret of the job; never sent over a connection."""

    def leave(
        self,
        wire: StoreWire,
        rank: int,
        challenge: bytes,
        *,
        leads: bool,
        open_door: Callable[[], tuple[tuple[str, ...], int]],
    ) -> None:
        """Write this rank's card; `open_door` opens listening sockets if other ranks are to connect."""
        number = wire.add(self._host)
        first = self._fan_out is not None and number == 1
        card = Card(rank, self._process, *(open_door() if leads or first else ((), 0)), challenge)
        if leads:
            wire.put("root", encode(card))
        if first:
            self._leader_number = wire.add("hosts")
            wire.put(f"hosts/{self._leader_number}", encode(card))
        wire.put(f"{self._host}/{number}", encode(card))
        wire.put(f"name/{rank}", socket.gethostname().encode())

    def host_names(self, wire: StoreWire, ranks: Iterable[int]) -> dict[int, str]:
        """Return rank → name of its host, without ranks that have left no card."""
        found = {rank: wire.find(f"name/{rank}") for rank in ranks}
        return {rank: name[0].decode() for rank, name in found.items() if name is not None}

    def of_host(self, wire: StoreWire, known: Container[int] = ()) -> dict[int, Card]:
        """Return number → card of this host's ranks so far, without `known` numbers."""
        numbers = [number for number in range(1, wire.add(self._host, 0) + 1) if number not in known]
        keys = {number: f"{self._host}/{number}" for number in numbers}
        return {number: _read(wire, key) for number, key in keys.items() if wire.has(key)}

    def above(self, wire: StoreWire) -> Card | None:
        """Return the card of the rank directly above, None if it has left none. Not for the coordinator."""
        key = "root"
        if self._fan_out is not None and self._leader_number is None:
            key = f"{self._host}/1"
        elif self._fan_out is not None and self._leader_number is not None and self._leader_number > self._fan_out:
            key = f"hosts/{(self._leader_number - 1) // self._fan_out}"
        found = wire.find(key)
        return None if found is None else decode(found[0])


def _start_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        # The name, in parentheses, may hold spaces and parentheses.
        return int(file.read().rpartition(")")[2].split()[_START_FIELD])


def _read(wire: StoreWire, key: str) -> Card:
    data, _ = wire.get(key)
    card: Card = decode(data)
    return card

"""Pool connections to the stores of process groups, and share one monitor of peers per group.

torchrun's agent keeps one store across restarts, and counts restarts per host. So the ranks agree on an id of this
start, the prefix of all keys, with keys under `dcp/start/`:

1. `hello/<rank>`: each rank writes a random value.
2. `offer`: the coordinator writes the id and all ranks' hellos.
3. `taken/<rank>`: a rank takes the id if the offer holds its hello, so it never takes an earlier start's id.
4. `agreed/<id>`: all ranks have taken it.
"""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dcp_ranks.errors import CoordinatorLostError, CoordinatorTimeoutError
from dcp_ranks.options import DEFAULT_PEERS, PeerOptions
from dcp_ranks.peers.monitor import Peers
from dcp_ranks.peers.roster import ProcessIdentity
from dcp_ranks.phases.leaders import Relays
from dcp_ranks.phases.store_phase import Waiting, name_missing
from dcp_ranks.transport.store_wire import (
    STORE_TIMEOUT,
    KeyValueStore,
    StoreWire,
    TimedStore,
    connect_store,
    guard_store,
    innermost_store,
    open_leased,
    prefixed_store,
)


@dataclass(slots=True)
class _Clones:
    prefix: str | None = None
    """None before the ranks have agreed on it."""
    agreement: StartAgreement | None = None
    first: tuple[TimedStore, Callable[[], KeyValueStore]] | None = None
    """A connection to check the store with, and a function that opens more."""
    idle: list[TimedStore] = field(default_factory=list)
    peers: dict[tuple[int, PeerOptions], Peers] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_SHARED_SECONDS = 5.0
_NEEDED = ("add", "check", "clone", "compare_set", "delete_key", "set", "set_timeout")
_clones: weakref.WeakKeyDictionary[dist.ProcessGroup, _Clones] = weakref.WeakKeyDictionary()
_clones_lock = threading.Lock()


def borrow_store(
    group: dist.ProcessGroup,
    timeout_seconds: float = STORE_TIMEOUT.total_seconds(),
    peer_timeout_seconds: float = DEFAULT_PEERS.peer_timeout_seconds,
) -> tuple[TimedStore, Callable[[], None]] | None:
    """Take a connection to the process group's store from a pool, or open a new one.

    It answers within `timeout_seconds` plus one, and breaks if the store's host does not answer for
    `peer_timeout_seconds`. Under a launcher such as torchrun, a group's first call agrees on an
    id of this start, so that ranks ignore older keys.

    Returns:
        The connection, and a function that returns it to the pool. None if the group has no store or is fake, or if the
        store's class lacks a method (before torch 2.8: is not a `TCPStore`).

    Raises:
        CoordinatorTimeoutError: In a group's first call, a rank did not arrive in time.
        CoordinatorLostError: The store does not answer, or this process cannot connect to it.

    Ranks: all get a connection or an error, or all get None. Only a group's first call is collective.
    """
    clones = _clones_of(group)
    with clones.lock:
        first = _connect_first(clones, group, timeout_seconds, peer_timeout_seconds)
        if first is None:
            return None
        root, connect = first
        root.timeout_seconds = timeout_seconds
        store = clones.idle.pop() if clones.idle else _clone(root, connect, peer_timeout_seconds)
    store.timeout_seconds = timeout_seconds
    return store, functools.partial(clones.idle.append, store)


def shared_store(group: dist.ProcessGroup, timeout_seconds: float) -> TimedStore | None:
    """Return torch's own connection, with the keys of `borrow_store`; None if there is no such store.

    Requests must be answered within seconds, because torch may wait on it.
    """
    if not _has_usable_store(group):
        return None
    clones = _clones_of(group)
    with clones.lock, guard_store("(connecting)"):
        shared, _ = _views(group, _SHARED_SECONDS)
        prefix = _agree_on_prefix(clones, group, shared, timeout_seconds)
    return TimedStore(prefixed_store(prefix, shared.underlying_store), _SHARED_SECONDS) if prefix else shared


def start_prefix(group: dist.ProcessGroup) -> str:
    """Return the prefix of this start's keys, which `borrow_store` adds; empty if the store cannot have older keys.

    Ranks: any, after `borrow_store` or `shared_store`; equal on all.
    """
    return _clones_of(group).prefix or ""


def store_of(group: dist.ProcessGroup) -> object:
    """Return the store object of a process group.

    On the rank that serves the store, a reference keeps the server running even after `destroy_process_group`. Deleting
    the last reference ends all ranks' connections.
    """
    return distributed_c10d._get_process_group_store(group)  # noqa: SLF001 - old torch too


def shared_peers(
    group: dist.ProcessGroup,
    store: KeyValueStore,
    coordinator_rank: int,
    options: PeerOptions,
) -> Peers:
    """Return the monitor of the other ranks of a group, shared by all its operations.

    `store` is from `borrow_store`. The coordinator rank is at the top of the tree. Options are the same on all ranks.
    """
    clones = _clones_of(group)
    with clones.lock:
        key = (coordinator_rank, options)
        if key not in clones.peers:
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
            number = len(clones.peers)  # not a number of operations: an interrupted one creates no monitor
            clones.peers[key] = make_peers(store, number, rank, world_size, coordinator_rank, options=options)
        return clones.peers[key]


def make_peers(
    store: KeyValueStore,
    number: int,
    rank: int,
    world_size: int,
    coordinator_rank: int,
    *,
    options: PeerOptions,
    process: ProcessIdentity | None = None,
) -> Peers:
    """Return a monitor, with leaders above `options.leaders_above` ranks."""
    kind = Relays if world_size > options.leaders_above else Peers
    return kind(store, number, rank, world_size, coordinator_rank, options=options, process=process)


def _clones_of(group: dist.ProcessGroup) -> _Clones:
    with _clones_lock:
        if group not in _clones:
            _clones[group] = _Clones()
        return _clones[group]


def _connect_first(
    clones: _Clones, group: dist.ProcessGroup, timeout_seconds: float, peer_timeout_seconds: float
) -> tuple[TimedStore, Callable[[], KeyValueStore]] | None:
    if clones.first is not None:
        return clones.first
    if not _has_usable_store(group):
        return None
    with guard_store("(connecting)"):
        shared, connect = _views(group, timeout_seconds)
    root = _clone(shared, connect, peer_timeout_seconds)
    # From here on our own connection is cloned: torch may be waiting on the group's.
    connect = getattr(root.underlying_store, "clone", connect)
    prefix = _agree_on_prefix(clones, group, root, timeout_seconds)
    if prefix:
        root = TimedStore(prefixed_store(prefix, root.underlying_store), timeout_seconds)
        connect = _below(prefix, connect)
    clones.first = root, connect
    return clones.first


def _agree_on_prefix(clones: _Clones, group: dist.ProcessGroup, store: TimedStore, timeout_seconds: float) -> str:
    if clones.prefix is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # the same on every rank
        clones.prefix = ""
    if clones.prefix is None:
        if clones.agreement is None:
            clones.agreement = StartAgreement(dist.get_rank(group), dist.get_world_size(group))
        try:
            clones.prefix = f"dcp/start/{clones.agreement.reach(store, timeout_seconds)}/"
        finally:
            store.rest()
    return clones.prefix


def _has_usable_store(group: dist.ProcessGroup) -> bool:
    """Decide by classes alone, which are equal on all ranks; a request's result may differ."""
    if dist.get_backend(group) == "fake":  # its other ranks do not exist
        return False
    store = store_of(group)
    inner = innermost_store(store)
    if not hasattr(store, "clone"):  # before torch 2.8
        return isinstance(inner, dist.TCPStore)  # type: ignore[attr-defined]
    if isinstance(inner, dist.TCPStore | dist.HashStore | dist.FileStore):  # type: ignore[attr-defined]
        return True
    # Methods that a Python class inherits from torch's base class do not count.
    base, own = dist.Store, type(inner)  # type: ignore[attr-defined]
    return all(getattr(own, name, None) not in (None, getattr(base, name, None)) for name in _NEEDED)


def _views(group: dist.ProcessGroup, timeout_seconds: float) -> tuple[TimedStore, Callable[[], KeyValueStore]]:
    given = cast("KeyValueStore", store_of(group))
    if hasattr(given, "clone"):
        return TimedStore(given, timeout_seconds), given.clone
    asked = TimedStore(given, timeout_seconds)
    prefix = f"dcp/{asked.compare_set('dcp/usable', '', uuid.uuid4().hex).decode()}"
    asked.rest()
    base = innermost_store(given)
    host, port = base.host, base.port
    own = TimedStore(prefixed_store(prefix, base), timeout_seconds)
    return own, lambda: prefixed_store(prefix, connect_store(host, port))


def _below(prefix: str, connect: Callable[[], KeyValueStore]) -> Callable[[], KeyValueStore]:
    return lambda: prefixed_store(prefix, connect())


def _clone(store: TimedStore, make: Callable[[], KeyValueStore], peer_timeout_seconds: float) -> TimedStore:
    """Open a connection after a check: connecting to a lost store takes minutes."""
    making = TimedStore(store.underlying_store, STORE_TIMEOUT.total_seconds())  # its thread may stay busy with it
    try:
        with guard_store("(connecting)"):
            store.check(["dcp"])
        socket.socket().close()  # without a descriptor torch would try again for minutes
        clone = making.ask(open_leased, make, peer_timeout_seconds)
    except CoordinatorLostError:
        raise
    except (RuntimeError, MemoryError, OSError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CoordinatorLostError(
            f"no further connection can be made to the store over which the ranks coordinate, although it answers "
            f"({reason}); look at the limits of this process (ulimit -n, ulimit -v) and at the store's host"
        ) from error
    finally:
        making.rest()
        store.rest()
    if innermost_store(clone) is not innermost_store(store):  # a HashStore is its own clone
        clone.set_timeout(STORE_TIMEOUT)
    return TimedStore(clone, store.timeout_seconds)


_PHASE = "agree on this start of the job"


class StartAgreement:
    """One rank's part in the agreement; `reach` may be called again after an error."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._drawn = uuid.uuid4().hex
        self._offered: list[str] = []
        self._id = ""

    def reach(self, store: KeyValueStore, timeout_seconds: float) -> str:
        """Return the id, the same on all ranks and new at each start. Collective."""
        wire = StoreWire(store, "dcp/start/", self._world_size)
        started = time.monotonic()
        wire.put(f"hello/{self._rank}", self._drawn.encode())
        step = self._lead if self._rank == 0 else self._follow
        report = functools.partial(self._report, wire)
        waiting = Waiting(repr(_PHASE), 0, timeout_seconds, int, report, started, started)
        agreed = False

        def ended() -> bool:
            nonlocal agreed
            agreed = step(wire)
            return agreed or waiting.over()

        wire.wait(ended, math.inf)
        if not agreed:
            missing = self._missing(wire)
            raise CoordinatorTimeoutError(_PHASE, missing, time.monotonic() - started)
        return self._id

    def _lead(self, wire: StoreWire) -> bool:
        keys = [f"hello/{rank}" for rank in range(self._world_size)]
        if not wire.has(*keys):
            return False
        hellos = [wire.get(key)[0].decode() for key in keys]
        if hellos != self._offered:
            self._id, self._offered = uuid.uuid4().hex, hellos
            wire.put("offer", json.dumps([self._id, hellos]).encode())
        if any(self._taken(wire, rank) != self._id for rank in range(1, self._world_size)):
            return False
        wire.put(f"agreed/{self._id}", b"")
        return True

    def _follow(self, wire: StoreWire) -> bool:
        if not wire.has("offer"):
            return False
        offered, drawn = json.loads(wire.get("offer")[0])
        if len(drawn) != self._world_size or drawn[self._rank] != self._drawn:
            return False
        if offered != self._id:
            wire.put(f"taken/{self._rank}", offered.encode())
            self._id = offered
        return wire.has(f"agreed/{offered}")

    def _taken(self, wire: StoreWire, rank: int) -> str:
        return wire.get(f"taken/{rank}")[0].decode() if wire.has(f"taken/{rank}") else ""

    def _report(self, wire: StoreWire) -> str:
        missing = self._missing(wire) if self._rank < 2 else []  # rank 1 logs if it waits for rank 0
        return name_missing(missing, self._world_size) if self._rank == 0 or 0 in missing else ""

    def _missing(self, wire: StoreWire) -> list[int]:
        everybody = range(self._world_size)
        if self._rank == 0 and self._id:
            return [rank for rank in everybody if rank and self._taken(wire, rank) != self._id]
        return [rank for rank in everybody if not wire.has(f"hello/{rank}")] or [0]

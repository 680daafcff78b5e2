"""Pool of connections to the stores of process groups, one for each running operation, and monitors of peers per group.

Where a launcher may have started the job before, all keys are below an id of this start (see `start_id`). Not in this
module: the phases that use these connections.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dcp_ranks.errors import ERROR_TYPES, ErrorTypes
from dcp_ranks.peers.monitor import Peers
from dcp_ranks.peers.options import PeerOptions
from dcp_ranks.start_id import StartAgreement, store_may_be_older
from dcp_ranks.transport.chunked_store import KeyValueStore, guard_store, store_lost
from dcp_ranks.transport.store_address import STORE_TIMEOUT, connect_store, innermost_store, prefixed_store
from dcp_ranks.transport.timed_store import TimedStore

__all__ = ["borrow_store", "prepare_store", "shared_peers", "start_prefix", "store_of"]


@dataclass(frozen=True, slots=True)
class _First:
    """The first connection to a group's store."""

    root: TimedStore
    """Connection that checks whether the store is alive."""
    connect: Callable[[], KeyValueStore]
    """Function that makes further connections, which have the prefix."""
    prefix: str
    """Prefix of the keys of this start of the job."""


@dataclass(slots=True)
class _Clones:
    """Connections to one group's store: the first one, and a pool for later use."""

    agreement: StartAgreement
    first: _First | None = None
    idle: list[TimedStore] = field(default_factory=list)
    peers: dict[tuple[int, PeerOptions], Peers] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_clones: weakref.WeakKeyDictionary[dist.ProcessGroup, _Clones] = weakref.WeakKeyDictionary()
_clones_lock = threading.Lock()


def prepare_store(
    group: dist.ProcessGroup,
    errors: ErrorTypes = ERROR_TYPES,
    timeout_seconds: float = STORE_TIMEOUT.total_seconds(),
) -> bool:
    """Open the first connection to the process group's store; later calls for the group do nothing.

    If the launcher serves the store (torchrun does), the ranks agree on an id of this start of the job, so that they do
    not find the keys of an earlier one.

    Args:
        group: Process group of the ranks.
        errors: Exception classes to raise.
        timeout_seconds: Time in seconds to wait for the other ranks.

    Returns:
        Whether ranks can communicate through the store; see `borrow_store`.

    Raises:
        CoordinatorTimeoutError: A rank did not call this, or `borrow_store`, in time.
        CoordinatorLostError: The store does not answer.

    Ranks: every rank of the group; the first call for a group is collective.
    """
    clones = _clones_of(group)
    with clones.lock:
        return _connect_first(clones, group, errors, timeout_seconds) is not None


def borrow_store(
    group: dist.ProcessGroup,
    errors: ErrorTypes = ERROR_TYPES,
    timeout_seconds: float = STORE_TIMEOUT.total_seconds(),
) -> tuple[TimedStore, Callable[[], None]] | None:
    """Take a connection to the process group's store from the pool, or open a new connection.

    Connections are pooled because a new one may need a name look-up, which takes seconds on some hosts, and because
    connecting to a lost store takes minutes.

    Args:
        group: Process group of the ranks.
        errors: Exception classes to raise.
        timeout_seconds: Time in seconds, plus one, that the store may take for an answer.

    Returns:
        The connection, and a function that returns it to the pool. None if ranks cannot communicate through the store:
        the group has no store or is a fake group, the store has no `compare_set`, or (before torch 2.8) is not a
        `TCPStore`.

    Raises:
        CoordinatorTimeoutError: In the first call for a group, a rank did not arrive in time (see `prepare_store`).
        CoordinatorLostError: The store does not answer.

    Ranks: every rank gets a connection, or every rank gets None; the call does not wait for other ranks after
        `prepare_store`.
    """
    clones = _clones_of(group)
    with clones.lock:
        first = _connect_first(clones, group, errors, timeout_seconds)
        if first is None:
            return None
        with guard_store("(connecting)", errors):
            first.root.timeout_seconds = timeout_seconds
            first.root.check(["dcp"])
            store = clones.idle.pop() if clones.idle else _clone(first.root, first.connect)
    store.timeout_seconds = timeout_seconds
    return store, functools.partial(clones.idle.append, store)


def start_prefix(group: dist.ProcessGroup) -> str:
    """Return the prefix of the keys of this start of the job; empty if the store cannot have keys of an earlier one.

    Connections from `borrow_store` have it already; other connections to the innermost store need it.

    Ranks: the same on every rank of the group, after `borrow_store`.
    """
    first = _clones_of(group).first
    return "" if first is None else first.prefix


def store_of(group: dist.ProcessGroup) -> object:
    """Return the store object of a process group.

    If this rank is the server of the store, a reference to the object keeps the server running, even after
    `destroy_process_group`. When the last reference is deleted, the connections of all ranks end.
    """
    return distributed_c10d._get_process_group_store(group)  # noqa: SLF001 - old torch too


def shared_peers(
    group: dist.ProcessGroup,
    store: KeyValueStore,
    coordinator_rank: int,
    options: PeerOptions,
    errors: ErrorTypes = ERROR_TYPES,
) -> Peers:
    """Return the monitor of the other ranks of a group; the first call creates it, and later operations share it.

    Args:
        group: Process group of the ranks.
        store: Connection to the store, from `borrow_store`.
        coordinator_rank: Rank within the group that is at the top of the tree.
        options: Options for watching and connecting to ranks, the same on all ranks.
        errors: Exception classes to raise.

    Example:
        ```python
        import torch.distributed as dist
        from dcp_ranks import PeerOptions, borrow_store, shared_peers

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        store, give_back = borrow_store(dist.group.WORLD)  # on every rank
        peers = shared_peers(dist.group.WORLD, store, 0, PeerOptions())
        peers.pause(0.0)
        assert not peers.lost
        give_back()
        dist.destroy_process_group()
        ```
    """
    clones = _clones_of(group)
    with clones.lock:
        key = (coordinator_rank, options)
        if key not in clones.peers:
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
            number = len(clones.peers)  # not the operation's: one that is interrupted here has made none
            clones.peers[key] = Peers(store, number, rank, world_size, coordinator_rank, options=options, errors=errors)
        return clones.peers[key]


def _clones_of(group: dist.ProcessGroup) -> _Clones:
    with _clones_lock:
        if group not in _clones:
            _clones[group] = _Clones(StartAgreement(dist.get_rank(group), dist.get_world_size(group)))
        return _clones[group]


def _connect_first(
    clones: _Clones, group: dist.ProcessGroup, errors: ErrorTypes, timeout_seconds: float
) -> _First | None:
    """Return a group's first connection, made if there is none; None if ranks cannot communicate through its store."""
    if clones.first is not None:
        return clones.first
    if dist.get_backend(group) == "fake":  # whose other ranks do not exist
        return None
    try:
        given = cast("KeyValueStore", store_of(group))
        store = TimedStore(given, timeout_seconds)
        store.check(["dcp"])
        drawn = store.compare_set("dcp/usable", "", uuid.uuid4().hex).decode()
        connect = _connector(given, f"dcp/{drawn}")
        root = _clone(store, connect)
        # From here on our own connection is cloned: torch may be waiting on the group's.
        connect = getattr(root.underlying_store, "clone", connect)
    except dist.DistNetworkError as error:
        raise store_lost("(connecting)", error, errors) from error
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    prefix = ""
    if store_may_be_older():
        prefix = f"dcp/start/{clones.agreement.reach(root, timeout_seconds, errors)}/"
        root = TimedStore(prefixed_store(prefix, root.underlying_store), timeout_seconds)
        connect = _below(prefix, connect)
    clones.first = _First(root, connect, prefix)
    return clones.first


def _below(prefix: str, connect: Callable[[], KeyValueStore]) -> Callable[[], KeyValueStore]:
    """Return a function that makes connections whose keys have a prefix."""
    return lambda: prefixed_store(prefix, connect())


def _connector(store: KeyValueStore, prefix: str) -> Callable[[], KeyValueStore]:
    """Return a function that makes further connections to a store.

    Before torch 2.8 stores have no `clone` and do not know their prefix: the new connections to a `TCPStore` then use
    `prefix`, which is the same on all ranks of the group and on no others. Raises AttributeError for other stores.
    """
    if hasattr(store, "clone"):
        return store.clone
    base = innermost_store(store)
    host, port = base.host, base.port
    return lambda: prefixed_store(prefix, connect_store(host, port))


def _clone(store: TimedStore, make: Callable[[], KeyValueStore]) -> TimedStore:
    """Clone a connection, and watch the first one meanwhile, as a clone of a lost store would block for minutes."""
    made: queue.SimpleQueue[KeyValueStore | RuntimeError] = queue.SimpleQueue()

    def work() -> None:
        try:
            made.put(make())
        except RuntimeError as error:
            made.put(error)

    threading.Thread(target=work, name="dcp-connect", daemon=True).start()
    deadline = time.monotonic() + STORE_TIMEOUT.total_seconds()
    while True:
        with contextlib.suppress(queue.Empty):
            clone = made.get(timeout=1)
            break
        store.check(["dcp"])
        if time.monotonic() >= deadline:
            raise dist.DistNetworkError("no second connection could be made")
    if isinstance(clone, RuntimeError):
        raise clone
    if innermost_store(clone) is not innermost_store(store):  # a HashStore is its own clone
        clone.set_timeout(STORE_TIMEOUT)
    return TimedStore(clone, store.timeout_seconds)

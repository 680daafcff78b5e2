"""Connections to process groups' stores, one for each operation in flight, and to peers: kept for the next operation.

Not here: what goes over them.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from dcp_core.peers import PeerOptions, Peers
from dcp_core.store_wire import KeyValueStore, guard_store, store_lost

__all__ = ["borrow_store", "shared_peers"]

# For connecting, and for a `get` of what should be there.
_STORE_TIMEOUT = timedelta(seconds=30)


@dataclass(slots=True)
class _Clones:
    """Connections to one group's store: one that only makes others, and those that wait for their next use."""

    root: KeyValueStore
    idle: list[KeyValueStore] = field(default_factory=list)
    peers: dict[tuple[int, PeerOptions], Peers] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_clones: weakref.WeakKeyDictionary[dist.ProcessGroup, _Clones] = weakref.WeakKeyDictionary()
_clones_lock = threading.Lock()


def borrow_store(group: dist.ProcessGroup) -> tuple[KeyValueStore, Callable[[], None]] | None:
    """A connection of one's own to the group's store, and what gives it back when it is in order and not needed.

    None where ranks cannot meet at the store: a group without one, a fake group, a store that cannot compare and set.
    The answer is the same on all ranks; none is asked. Connecting takes about a millisecond, but name look-ups that it
    may involve take seconds on some hosts, and once the store is gone it takes minutes: connections are kept, and an
    existing one is tried first.
    """
    with _clones_lock:
        clones = _clones.get(group)
        if clones is None:
            root = _usable_clone(group)
            if root is None:
                return None
            clones = _clones[group] = _Clones(root)
    with clones.lock, guard_store("(connecting)"):
        clones.root.check(["dcp"])
        store = clones.idle.pop() if clones.idle else _clone(clones.root)
    return store, functools.partial(clones.idle.append, store)


def shared_peers(
    group: dist.ProcessGroup, store: KeyValueStore, sequence: int, coordinator_rank: int, options: PeerOptions
) -> Peers:
    """The peers of a group whose store was borrowed; made by the first operation that asks for them.

    Args:
        group: The group.
        store: The connection that this operation has borrowed.
        sequence: The operation's number.
        coordinator_rank: The rank, within the group, at the top.
        options: The same on all ranks.
    """
    clones = _clones[group]
    with clones.lock:
        key = (coordinator_rank, options)
        if key not in clones.peers:
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
            clones.peers[key] = Peers(store, sequence, rank, world_size, coordinator_rank, options=options)
        return clones.peers[key]


def _usable_clone(group: dist.ProcessGroup) -> KeyValueStore | None:
    if dist.get_backend(group) == "fake":  # whose other ranks do not exist
        return None
    try:
        store = cast("KeyValueStore", group.get_group_store())
        store.check(["dcp"])
        store.compare_set("dcp/usable", "", "yes")
        return _clone(store)
    except dist.DistNetworkError as error:
        raise store_lost("(connecting)", error) from error
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def _clone(store: KeyValueStore) -> KeyValueStore:
    """A second connection, for which a store that is gone is asked for minutes: watch the first one meanwhile."""
    made: queue.SimpleQueue[KeyValueStore | RuntimeError] = queue.SimpleQueue()

    def connect() -> None:
        try:
            made.put(store.clone())
        except RuntimeError as error:
            made.put(error)

    threading.Thread(target=connect, name="dcp-connect", daemon=True).start()
    deadline = time.monotonic() + _STORE_TIMEOUT.total_seconds()
    while True:
        with contextlib.suppress(queue.Empty):
            clone = made.get(timeout=1)
            break
        store.check(["dcp"])
        if time.monotonic() >= deadline:
            raise dist.DistNetworkError("no second connection could be made")
    if isinstance(clone, RuntimeError):
        raise clone
    if _innermost(clone) is not _innermost(store):  # a HashStore is its own clone
        clone.set_timeout(_STORE_TIMEOUT)
    return clone


def _innermost(store: KeyValueStore) -> object:
    inner: object = store
    while (below := getattr(inner, "underlying_store", None)) is not None:
        inner = below
    return inner

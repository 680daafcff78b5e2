"""Choose the coordinator for a process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch.distributed as dist

from dcp_ranks.errors import CheckpointException, CoordinatorTimeoutError, RanksError
from dcp_ranks.interrupts import interrupts_deferred
from dcp_ranks.options import DEFAULT_PEERS, PeerOptions
from dcp_ranks.phases.collective_coordinator import CollectiveCoordinator, own_group
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS, Coordinator, LocalCoordinator
from dcp_ranks.phases.phases import failure_of
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.store_connections import borrow_store, shared_peers, shared_store


def make_coordinator(
    process_group: dist.ProcessGroup | None = None,
    *,
    no_dist: bool = False,
    coordinator_rank: int = 0,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    peers: PeerOptions | None = None,
) -> Coordinator:
    """Return the coordinator of one operation of a process group: a context manager that ends the operation on exit.

    Ranks communicate through the group's store if its class allows that, otherwise by object collectives.

    Args:
        process_group: Process group of the ranks that take part; None for all ranks.
        no_dist: Whether this process works alone, even if process groups exist.
        coordinator_rank: Rank within the group that runs each `reduce_fn`.
        timeout_seconds: Seconds that a rank waits in one phase for half of the others, and then for the rest. Object
            collectives use the timeout of the process group instead.
        peers: Options for watching and connecting, the same on all ranks; unused with object collectives.

    Raises:
        ValueError: This process is not in the group, the group lacks the coordinator rank, or `timeout_seconds` is not
            above 0.
        CoordinatorLostError: The group's store does not answer, or this rank cannot connect to it.
        CheckpointException: This rank lacks a resource, such as descriptors; the other ranks also fail.
        CoordinatorTimeoutError: A launcher such as torchrun serves the store, and a rank missed this group's first
            call.

    Ranks: every rank of the group, in the same order of operations. Only a group's first call under such a launcher
        waits for other ranks. Call it in the thread that starts the operation, before any user code runs.

    Example:
        ```python
        from dcp_ranks import make_coordinator

        with make_coordinator(timeout_seconds=60) as ranks:  # on every rank
            total = ranks.all_reduce("count samples", lambda: 100, sum)
        ```
    """
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return LocalCoordinator()
    group = dist.group.WORLD if process_group is None else process_group
    rank = dist.get_rank(group)
    if group is None or rank < 0:
        raise ValueError("this process is not a rank of the process group: only the group's own ranks may call this")
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return LocalCoordinator()
    if not timeout_seconds > 0:  # NaN, too
        raise ValueError(f"timeout_seconds={timeout_seconds!r}: pass the seconds to wait for other ranks, more than 0")
    if not 0 <= coordinator_rank < world_size:
        raise ValueError(f"coordinator_rank is {coordinator_rank}; the group has the ranks 0 to {world_size - 1}")
    # It may wait for other ranks, so signals are not deferred.
    begin = _prepare(group, coordinator_rank, timeout_seconds, peers or DEFAULT_PEERS)
    made = None
    try:
        # From this call on the other ranks wait for this one: they must be notified if it is interrupted.
        with interrupts_deferred():
            made = begin()
    except BaseException as error:
        if made is not None:
            made.__exit__(type(error), error, error.__traceback__)
        raise
    return made


def _prepare(
    group: dist.ProcessGroup, coordinator_rank: int, timeout_seconds: float, peers: PeerOptions
) -> Callable[[], Coordinator]:
    """Acquire all resources, or make the operation fail on all ranks now instead of at their deadline."""
    rank = dist.get_rank(group)
    borrowed = None
    try:
        borrowed = borrow_store(group, timeout_seconds, peers.peer_timeout_seconds)
        if borrowed is None:
            apart = own_group(group)
            return partial(
                CollectiveCoordinator, apart, coordinator_rank=coordinator_rank, timeout_seconds=timeout_seconds
            )
        store, release = borrowed
        watching = shared_peers(group, store, coordinator_rank, peers)
    except BaseException as error:
        if borrowed is not None:
            borrowed[0].rest()
            borrowed[1]()
        # At a timeout another rank did not arrive, so no rank waits for this one.
        if isinstance(error, CoordinatorTimeoutError) or not isinstance(error, Exception):
            raise
        with contextlib.suppress(Exception):  # the store is lost, most likely
            _withdraw(group, rank, timeout_seconds, error)
        if isinstance(error, RanksError):
            raise
        failure = {rank: (error, failure_of(rank, error).text)}
        raise CheckpointException("the operation could not begin", failure) from error
    return partial(
        StoreCoordinator,
        store,
        rank,
        dist.get_world_size(group),
        coordinator_rank=coordinator_rank,
        timeout_seconds=timeout_seconds,
        hosts_store=dist.get_rank() == 0,
        release=release,
        peers=watching,
    )


def _withdraw(group: dist.ProcessGroup, rank: int, timeout_seconds: float, error: Exception) -> None:
    store = shared_store(group, timeout_seconds)
    if store is None:
        return
    try:
        made = StoreCoordinator(store, rank, dist.get_world_size(group))
        made.__exit__(type(error), error, error.__traceback__)
    finally:
        store.rest()


_assumed: ContextVar[int | None] = ContextVar("_assumed", default=None)


def job_size() -> int:
    """Return the number of ranks of the whole job; 1 without process groups."""
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def assume_job_size(size: int) -> Iterator[None]:
    """Make `job_size` return `size` in this thread; for worker processes."""
    token = _assumed.set(size)
    try:
        yield
    finally:
        _assumed.reset(token)

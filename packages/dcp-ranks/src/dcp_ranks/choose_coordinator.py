"""`make_coordinator`: makes the coordinator that fits the store, backend and size of a process group."""

from __future__ import annotations

import torch.distributed as dist

from dcp_ranks.errors import ERROR_TYPES, ErrorTypes
from dcp_ranks.interrupts import interrupts_deferred
from dcp_ranks.peers.options import PeerOptions
from dcp_ranks.phases.collective_coordinator import CollectiveCoordinator
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS, Coordinator, LocalCoordinator
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.store_connections import borrow_store, prepare_store, shared_peers

__all__ = ["make_coordinator"]


def make_coordinator(
    process_group: dist.ProcessGroup | None = None,
    *,
    no_dist: bool = False,
    coordinator_rank: int = 0,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    peers: PeerOptions | None = None,
    errors: ErrorTypes = ERROR_TYPES,
) -> Coordinator:
    """Return a coordinator for one operation of a process group: a context manager that ends the operation on exit.

    The ranks communicate through the group's store where possible, otherwise by object collectives. A single rank does
    not communicate.

    Args:
        process_group: Process group of the ranks that take part; None for all ranks.
        no_dist: Whether this process works alone, even if process groups exist.
        coordinator_rank: Rank within the group that runs each `reduce_fn`.
        timeout_seconds: Time in seconds that a rank waits for the other ranks in one phase, counted from its own
            arrival. The last rank must arrive within this time after the first. Object collectives use the timeout of
            the process group instead.
        peers: Options for watching and connecting to other ranks, the same on all ranks; None for the defaults. The
            options have no effect on object collectives.
        errors: Exception classes that the coordinator raises.

    Returns:
        The coordinator. Operations of a group are numbered in the order of these calls.

    Raises:
        ValueError: This process is not in the group, the group has no such coordinator rank, or `timeout_seconds` is
            not above 0.
        CoordinatorLostError: The group's store does not answer any more.
        CoordinatorTimeoutError: The ranks were started by a launcher that serves the store, such as torchrun, and one
            of them did not make this group's first call in time.

    Ranks: every rank of the group; several operations must be started in the same order on every rank. The call does
        not wait for other ranks, but for the first one of a group under such a launcher. Call it in the thread that
        starts the operation, before any user code runs.

    Example:
        ```python
        from dcp_ranks import make_coordinator

        with make_coordinator(timeout_seconds=60) as ranks:  # on every rank
            total = ranks.all_reduce("count samples", lambda: 100, sum)
        ```
    """
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return LocalCoordinator(errors=errors)
    group = dist.group.WORLD if process_group is None else process_group
    rank = dist.get_rank(group)
    if group is None or rank < 0:
        raise ValueError("this process is not a rank of the process group: only the group's own ranks may call this")
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return LocalCoordinator(errors=errors)
    if not timeout_seconds > 0:  # NaN, too
        raise ValueError(f"timeout_seconds={timeout_seconds!r}: pass the seconds to wait for other ranks, more than 0")
    if not 0 <= coordinator_rank < world_size:
        raise ValueError(f"coordinator_rank is {coordinator_rank}; the group has the ranks 0 to {world_size - 1}")
    if not prepare_store(group, errors, timeout_seconds):  # may wait for other ranks, so signals are not deferred
        return CollectiveCoordinator(
            group, coordinator_rank=coordinator_rank, timeout_seconds=timeout_seconds, errors=errors
        )
    made = None
    try:
        # From this call on the other ranks wait for this one: they must be notified if it is interrupted.
        with interrupts_deferred():
            made = _at_store(group, rank, coordinator_rank, timeout_seconds, peers or PeerOptions(), errors)
    except BaseException as error:
        if made is not None:
            made.__exit__(type(error), error, error.__traceback__)
        raise
    return made


def _at_store(
    group: dist.ProcessGroup,
    rank: int,
    coordinator_rank: int,
    timeout_seconds: float,
    peers: PeerOptions,
    errors: ErrorTypes,
) -> StoreCoordinator:
    """Return a coordinator whose ranks communicate through the group's store, which is prepared."""
    borrowed = borrow_store(group, errors, timeout_seconds)
    assert borrowed is not None
    store, release = borrowed
    sequence = StoreCoordinator.draw(store, rank, errors)
    return StoreCoordinator(
        store,
        rank,
        dist.get_world_size(group),
        coordinator_rank=coordinator_rank,
        sequence=sequence,
        timeout_seconds=timeout_seconds,
        hosts_store=dist.get_rank() == 0,
        release=release,
        peers=shared_peers(group, store, coordinator_rank, peers, errors),
        errors=errors,
    )

"""What fails on one rank alone: the operation goes well on all ranks, or fails on all, and no byte of ours is misread.

The decisions that must be equal on all ranks are listed in docs/development/architecture.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dcp_ranks import RanksError, make_coordinator, store_connections
from dcp_ranks.peers import monitor, roster
from dcp_ranks.phases.collective_coordinator import CollectiveCoordinator
from dcp_ranks.transport.store_wire import TimedStore

START = threading.Thread.start


def refuse(code: int) -> Callable[..., object]:
    def call(*_: object, **__: object) -> object:
        raise OSError(code, os.strerror(code))

    return call


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Context manager in which this process gets no further descriptor from the kernel."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(os.devnull, os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def no_thread(thread: threading.Thread) -> None:
    if thread.name.startswith("dcp-"):
        raise RuntimeError("can't start new thread")
    START(thread)


def no_answer(store: TimedStore, *_: object) -> object:
    raise RuntimeError("it has not answered for 2 s")


def no_memory(*_: object, **__: object) -> object:
    raise MemoryError


FAILURES: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[object]], bool]] = {
    "no thread": (lambda: mock.patch.object(threading.Thread, "start", no_thread), True),
    "no descriptor": (no_descriptors, False),
    "no second connection": (lambda: mock.patch.object(store_connections, "_clone", refuse(errno.ECONNREFUSED)), False),
    "no memory for a connection": (lambda: mock.patch.object(store_connections, "_clone", no_memory), False),
    "no answer to a connection": (lambda: mock.patch.object(store_connections, "_clone", no_answer), False),
    "no epoll": (lambda: mock.patch.object(monitor, "_PeerHandles", refuse(errno.EMFILE)), False),
    "no monitor": (lambda: mock.patch.object(monitor, "CardBox", no_memory), False),
    "no identity of processes": (lambda: mock.patch.object(roster, "_start_of", refuse(errno.EACCES)), True),
    "no watching of processes": (lambda: mock.patch.object(os, "pidfd_open", refuse(errno.ENOSYS)), True),
    "no listening socket": (lambda: mock.patch.object(socket, "create_server", refuse(errno.EADDRINUSE)), True),
}


def tokens() -> list[int]:
    """Return what a trainer's own collective gives."""
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([1111 * (dist.get_rank() + 1)]))
    return [int(each) for each in found]


def operation(group: dist.ProcessGroup) -> str:
    try:
        with make_coordinator(group, timeout_seconds=200) as them:
            return f"gathered {them.all_gather('count', lambda: them.rank)}"
    except RanksError as error:
        return f"{type(error).__name__}: {error}"


def operations(failure: str, failing: int) -> tuple[list[str], float, list[list[int]], list[str]]:
    """Run three operations over a new group, the first with a failure on one rank; returns what each gives."""
    group, heard, seconds = dist.new_group(), [], 0.0
    before = {*threading.enumerate()}  # of other tests, too
    assert group is not None
    context, _ = FAILURES[failure]
    collectives = [tokens()]
    for number in range(3):
        fails = number == 0 and dist.get_rank() == failing
        began = time.monotonic()
        with context() if fails else contextlib.nullcontext():
            heard.append(operation(group))
        seconds = max(seconds, time.monotonic() - began)
        collectives.append(tokens())
    left = [thread.name for thread in {*threading.enumerate()} - before if thread.name.startswith("dcp-")]
    return heard, seconds, collectives, left


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("failure", FAILURES)
def test_what_fails_on_one_rank_before_an_operation(ranks, failure: str, failing: int):
    harmless = FAILURES[failure][1]
    found = ranks.run(3, operations, failure, failing)
    for rank, (heard, seconds, collectives, left) in enumerate(found):
        assert collectives == [[1111, 2222, 3333]] * 4
        assert heard[1:] == ["gathered [0, 1, 2]"] * 2
        assert left == []
        assert seconds < 100  # of a deadline of 200
        if harmless:
            assert heard[0] == "gathered [0, 1, 2]"
        elif rank == failing:
            assert not heard[0].startswith("gathered")
        else:
            assert heard[0].startswith("CheckpointException")
            assert f"(failed on rank {failing})" in heard[0]


class WithoutClone:
    """A store as those of older versions of torch are."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        if name == "clone":
            raise AttributeError(name)
        return getattr(self._store, name)


def test_collectives_of_operations_are_apart_from_the_trainers(ranks, tmp_path):
    def call(path: str) -> tuple[str, list[int], bool]:
        rank = dist.get_rank()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
        given = store_connections.distributed_c10d._get_process_group_store
        with mock.patch.object(
            store_connections.distributed_c10d, "_get_process_group_store", lambda group: WithoutClone(given(group))
        ):
            made = make_coordinator()
            assert isinstance(made, CollectiveCoordinator)
        stuck = None
        if rank == 0:  # its partner fails before the phase: it stays in ours, while the trainer goes on
            stuck = threading.Thread(target=lambda: gathered(made), daemon=True)
            stuck.start()
        found = tokens()
        waits = stuck is not None and stuck.is_alive()
        if rank == 1:
            gathered(made)  # lets the other rank go
        if stuck is not None:
            stuck.join()
        dist.barrier()
        dist.destroy_process_group()
        return type(made).__name__, found, waits

    def gathered(made: CollectiveCoordinator) -> None:
        made.all_gather("x", lambda: 1)

    found = ranks.run(2, call, str(tmp_path / uuid.uuid4().hex))
    assert [numbers for _, numbers, _ in found] == [[1111, 2222]] * 2
    assert found[0][2]
    ranks.run(1, dist.is_initialized, backend=None)  # the pool's own group is gone

"""Phases on real ranks, of which one is late or dies: nobody waits for ever, and the missing ones are named."""

from __future__ import annotations

import os
import select
import signal
import socket
import uuid

import pytest
import torch.distributed as dist

from dcp_ranks import make_coordinator
from dcp_ranks.errors import (
    CoordinatorLostError,
    CoordinatorTimeoutError,
    PeerLostError,
)
from dcp_ranks.phases.phases import check_fence
from integration_tests.kits.coordinators import STORE_KINDS, caught, coordinator, hear, leftover_keys, say

# Much longer than a rank that is not late can be held up by what else runs on the machine.
LATE_SECONDS = 8


def late(kind, late_rank, coordinator_rank, word):
    rank = dist.get_rank()
    dist.barrier()
    with coordinator(kind, timeout_seconds=LATE_SECONDS, coordinator_rank=coordinator_rank) as them:
        if rank == late_rank:
            hear(word)
        error = caught(lambda: them.all_gather("plan", lambda: rank))
        say(word)
    left = leftover_keys()
    with coordinator(kind, coordinator_rank=coordinator_rank) as them:
        return error, left, them.all_gather("again", lambda: rank)


@pytest.mark.parametrize("kind", STORE_KINDS)
@pytest.mark.parametrize(("late_rank", "lead"), [(2, 0), (0, 0), (0, 1)])
def test_a_deadline_names_the_late_rank_and_the_next_operation_works(ranks, kind, late_rank, lead):
    for error, left, again in ranks.run(4, late, kind, late_rank, lead, uuid.uuid4()):
        assert type(error) is CoordinatorTimeoutError
        assert error.ranks == (late_rank,)
        assert error.phase == "plan"
        assert error.hosts == {late_rank: socket.gethostname()}
        assert f"for rank {late_rank} ({socket.gethostname()});" in str(error)
        assert left == []
        assert again == [0, 1, 2, 3]


def slow_reduce(kind, word):
    published = []

    def publish(_):
        check_fence()
        hear(word)
        check_fence()
        published.append(1)

    with coordinator(kind, timeout_seconds=LATE_SECONDS) as them:
        dist.barrier()
        error = caught(lambda: them.all_reduce("publish", lambda: 1, publish))
        say(word)
        assert published == []
        return error


@pytest.mark.parametrize("kind", STORE_KINDS)
def test_a_deadline_names_the_coordinator_when_all_wait_for_it(ranks, kind):
    for error in ranks.run(3, slow_reduce, kind, uuid.uuid4()):
        assert type(error) is CoordinatorTimeoutError
        assert error.ranks == (0,)


def killed(victim, timeout_seconds, word):
    def work():
        rank = dist.get_rank()
        say(f"{word} {rank}")
        if rank == victim:
            for other in {*range(dist.get_world_size())} - {victim}:
                hear(f"{word} {other}")
            os.kill(os.getpid(), signal.SIGKILL)

    def operation():
        with make_coordinator(timeout_seconds=timeout_seconds) as them:
            them.all_gather("write", work)

    dist.barrier()
    return caught(operation)


def test_a_killed_rank_is_named_long_before_the_deadline(ranks):
    """In the first phase of a group's first operation, when not all ranks have met."""
    found = ranks.run(4, killed, 2, 1800.0, uuid.uuid4(), expect_death=[2])
    for error in (found[0], found[1], found[3]):
        assert type(error) is PeerLostError
        assert (error.phase, error.ranks, error.how) == ("write", (2,), ("its process has ended",))
        for part in ("phase 'write'", "rank 2 is gone", "restart the job"):
            assert part in str(error)


def test_a_lost_store_is_noticed_long_before_the_deadline(ranks):
    found = ranks.run(4, killed, 0, 1800.0, uuid.uuid4(), expect_death=[0])
    assert [type(error) for error in found[1:]] == [CoordinatorLostError] * 3
    assert all("phase 'write'" in str(error) for error in found[1:])


def lost_before_the_start():
    """Rank 0, with the store, ends once rank 1 is out of the first operation; rank 1 begins another after that."""
    with make_coordinator() as them:
        first = them.broadcast("before", os.getpid)
    if them.rank == 0:
        hear("rank 1 is out")
        os.kill(os.getpid(), signal.SIGKILL)
    end = os.pidfd_open(first)
    say("rank 1 is out")
    select.select([end], [], [])
    os.close(end)
    return caught(make_coordinator)


def test_an_operation_on_a_lost_store_does_not_start(ranks):
    assert type(ranks.run(2, lost_before_the_start, expect_death=[0])[1]) is CoordinatorLostError

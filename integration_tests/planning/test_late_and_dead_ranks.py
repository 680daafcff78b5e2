"""Many ranks in virtual time: they arrive within 20 minutes, one never comes, or the coordinator dies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from dcp_core import save
from dcp_core.testing.rehearsal import network
from dcp_core.testing.rehearsal.clock import Task
from dcp_core.testing.rehearsal.world import Cluster, VirtualWriter, World
from dcp_ranks import CoordinatorLostError, CoordinatorTimeoutError, PeerLostError, PeerOptions
from dcp_ranks.phases import leaders, store_phase
from dcp_ranks.transport import store_wire

RANKS_PER_HOST = 8
LATEST_SECONDS = 20 * 60.0
TOLD_SECONDS = 10.0


@pytest.fixture(params=[128, pytest.param(1024, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def world(request: pytest.FixtureRequest) -> World:
    return World(Cluster(request.param, RANKS_PER_HOST, peers=PeerOptions(leaders_above=64)))


@pytest.fixture
def rare_polls() -> Iterator[None]:
    """All ranks together look at the store 1,280 times a second; here, 40 times."""
    with (
        mock.patch.object(store_wire, "_RANKS_PER_LAST_PAUSE", 2),
        mock.patch.object(store_wire, "_LONGEST_PAUSE_SECONDS", 30.0),
        mock.patch.object(leaders, "_POLLS_PER_SECOND", 40),
        mock.patch.object(leaders, "_MOST_POLL_SECONDS", 30.0),
        mock.patch.object(store_phase, "_COUNTS_PER_SECOND", 40),
    ):
        yield


def lines_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "waiting for" in record.getMessage()]


def play(
    world: World, arrive: Callable[[int], None] = lambda _: None, **options: Any
) -> tuple[list[Task], list[float]]:
    """All ranks save; the tasks, and when each ended."""
    ends = [0.0] * world.cluster.ranks

    def run(rank: int) -> None:
        try:
            arrive(rank)
            save({"step": 5}, storage_writer=VirtualWriter(world, "run"))
        finally:
            ends[rank] = world.clock.now

    return world.run(run, **options), ends


@pytest.mark.usefixtures("rare_polls")
@pytest.mark.parametrize("coordinator", ["first", "last"])
def test_ranks_that_arrive_within_20_minutes_save(
    world: World, coordinator: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, hosts = world.cluster.ranks, world.cluster.ranks // RANKS_PER_HOST
    starts = [LATEST_SECONDS * (rank // RANKS_PER_HOST) / (hosts - 1) for rank in range(ranks)]
    if coordinator == "last":
        starts.reverse()
    tasks, ends = play(world, starts=starts)
    assert [task.error for task in tasks if task.error is not None] == []
    assert max(ends) < LATEST_SECONDS + 60
    lines = lines_of(caplog)
    assert len(lines) == 6
    for line, seconds in zip(lines, (30, 60, 120, 240, 480, 960), strict=True):
        assert seconds <= line.created < 1.2 * seconds
        assert f" of {ranks:,} ranks: " in line.getMessage()
        assert "(host-" in line.getMessage()


@pytest.mark.usefixtures("rare_polls")
def test_a_rank_that_never_comes_is_named_with_its_host(world: World, caplog: pytest.LogCaptureFixture) -> None:
    late, ranks = 101, world.cluster.ranks
    tasks, ends = play(world, lambda rank: world.clock.pause(1e6) if rank == late else None)
    for task in tasks[:late] + tasks[late + 1 :]:
        assert isinstance(task.error, CoordinatorTimeoutError)
        assert task.error.ranks == (late,)
        assert task.error.hosts == {late: "host-12"}
        assert "rank 101 (host-12)" in str(task.error)
    assert max(ends[:late] + ends[late + 1 :]) < world.cluster.timeout_seconds + 60
    assert f"waiting for 1 of {ranks:,} ranks: 101 (host-12); " in lines_of(caplog)[0].getMessage()


@pytest.mark.parametrize("late", [0, 101])
@pytest.mark.parametrize("serves", [False, True])
@pytest.mark.parametrize("vanishes", [False, True])
def test_the_death_of_the_coordinator_is_told_to_all_ranks(
    world: World, late: int, serves: bool, vanishes: bool
) -> None:
    """Its process ends, or its host vanishes, while all wait for it, or for another rank."""
    died = 30.0 if world.cluster.ranks > 128 else 5.0
    dead = range(RANKS_PER_HOST) if vanishes else [0]
    # When the kernels of other hosts report it: the default of `peer_timeout_seconds`, or a short one.
    known = 0.001 if not vanishes else 120.0 if world.cluster.ranks > 128 else 10.0
    ask = network._Store._ask

    def die() -> None:
        world.network.kill(dead, seconds=known)
        world.network.store_lost = serves

    def ask_the_dead(store: Any, *arguments: Any, **options: Any) -> Any:
        if serves and world.clock.now >= died:
            world.clock.wait_until(died + known)
        return ask(store, *arguments, **options)

    world.clock.at(died, die)
    with mock.patch.object(network._Store, "_ask", ask_the_dead):
        tasks, ends = play(world, lambda rank: world.clock.pause(1e6) if rank == late else None, limit_seconds=1e5)
    others = [rank for rank in range(world.cluster.ranks) if rank not in {*dead, late}]
    for rank in others:
        assert isinstance(tasks[rank].error, CoordinatorLostError if serves else PeerLostError), tasks[rank].error
    assert max(ends[rank] for rank in others) < died + known + TOLD_SECONDS

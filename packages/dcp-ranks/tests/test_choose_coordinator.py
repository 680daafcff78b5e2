"""Which coordinator a group gets, the coordinator of one process, and the fallback."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dcp_ranks import make_coordinator
from dcp_ranks.errors import CoordinatorTimeoutError, format_ranks
from dcp_ranks.phases.collective_coordinator import CollectiveCoordinator
from dcp_ranks.phases.coordinator import LocalCoordinator
from dcp_ranks.phases.phases import failure_of, shorten
from dcp_ranks.phases.store_coordinator import StoreCoordinator


def test_without_a_group_there_is_one_process():
    with make_coordinator() as them:
        assert type(them) is LocalCoordinator
        assert (them.rank, them.world_size, them.is_coordinator) == (0, 1, True)
        assert them.reduce_scatter("a", lambda: 2, lambda values: [value + 1 for value in values]) == 3
        assert them.all_reduce("a", lambda: 2, sum) == 2
        assert them.all_gather("a", lambda: 2) == [2]
        assert them.broadcast("a", lambda: 2) == 2
        assert them.barrier("a") is None
        assert them.agree("a", lambda: 2, "numbers") is None
        assert them.save_nonce() == them.save_nonce() != LocalCoordinator().save_nonce()


def test_one_process_raises_the_error_itself():
    with make_coordinator() as them, pytest.raises(ZeroDivisionError):
        them.all_gather("a", lambda: 1 / 0)


def chosen(**options):
    with make_coordinator(**options) as them:
        return type(them).__name__


@pytest.mark.parametrize(
    ("world_size", "options", "name"),
    [
        (1, {}, LocalCoordinator.__name__),
        (2, {}, StoreCoordinator.__name__),
        (2, {"no_dist": True}, LocalCoordinator.__name__),
    ],
)
def test_choice(ranks, world_size, options, name):
    assert ranks.run(world_size, lambda: chosen(**options)) == [name] * world_size


def refused(seconds):
    with pytest.raises(ValueError, match=r"timeout_seconds=.* more than 0"):
        make_coordinator(timeout_seconds=seconds)
    with make_coordinator() as them:
        return them.all_gather("a", lambda: them.rank)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_timeout_that_is_none_is_refused_and_does_no_harm(ranks, seconds):
    assert ranks.run(2, refused, seconds) == [[0, 1]] * 2


def over_a_file_store(path):
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    with make_coordinator() as them:
        found = type(them).__name__, them.all_gather("x", lambda: rank), them.all_gather("y", them.save_nonce)
    dist.barrier()
    dist.destroy_process_group()
    return found


def over_a_fake_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with make_coordinator() as them:
            return type(them).__name__, them.all_gather("x", lambda: 5), len(them.save_nonce())
    finally:
        dist.destroy_process_group()


@pytest.mark.newest
def test_a_group_over_a_file(ranks, tmp_path):
    found = ranks.run(2, over_a_file_store, str(tmp_path / "store"))
    for name, values, nonces in found:
        assert name == StoreCoordinator.__name__
        assert values == [0, 1]
        assert nonces[0] == nonces[1]
    ranks.run(1, dist.is_initialized, backend=None)  # the pool's own group is gone


@pytest.mark.newest
def test_a_fake_group_gets_collectives(ranks):
    assert ranks.run(1, over_a_fake_group, backend=None) == [(CollectiveCoordinator.__name__, [5] * 4, 16)]


def of_ranks():
    with make_coordinator() as them:
        return type(them).__name__, them.all_gather("x", lambda: them.rank)


def test_a_group_without_a_cpu_backend(ranks):
    found = ranks.run(2, of_ranks, backend="cuda:gloo")  # no collective of this group takes a CPU tensor
    assert found == [(StoreCoordinator.__name__, [0, 1])] * 2


@pytest.mark.device
def test_a_group_of_devices(ranks, device, device_backend):
    world = min(2, torch.get_device_module(device).device_count())
    found = ranks.run(world, of_ranks, backend=device_backend)
    assert found == [(StoreCoordinator.__name__, [*range(world)])] * world


def test_coordinator_rank_is_checked(ranks):
    def call():
        with pytest.raises(ValueError, match="coordinator_rank is 2"):
            make_coordinator(coordinator_rank=2)
        with pytest.raises(ValueError, match="coordinator_rank is -1"):
            CollectiveCoordinator(dist.group.WORLD, coordinator_rank=-1)

    ranks.run(2, call)


def nonce_by_collective():
    with CollectiveCoordinator(dist.group.WORLD) as them:
        return them.save_nonce(), them.save_nonce()


def test_a_nonce_by_collective(ranks):
    found = ranks.run(2, nonce_by_collective)
    assert len({nonce for pair in found for nonce in pair}) == 1


def test_an_operation_that_was_not_closed_holds_up_the_next_collectives_only_so_long(ranks):
    def call():
        first = CollectiveCoordinator(dist.group.WORLD)
        second = CollectiveCoordinator(dist.group.WORLD, timeout_seconds=0.1)
        with pytest.raises(CoordinatorTimeoutError):
            second.barrier("x")
        second.close()
        first.close()
        with CollectiveCoordinator(dist.group.WORLD, timeout_seconds=100) as third:
            return third.all_gather("x", lambda: 1)

    assert ranks.run(2, call) == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "rank 3"), ([2, 0, 1], "ranks 0-2"), ([0, 2, 3, 9], "ranks 0, 2-3, 9")],
)
def test_ranks_as_words(numbers, text):
    assert format_ranks(numbers) == text


def test_reports_stay_small():
    def deep(depth):
        if depth:
            deep(depth - 1)
        raise ValueError("x" * 1_000_000)

    try:
        deep(3)
    except ValueError as error:
        failure = failure_of(1, error)
    assert failure.exception is None
    assert len(failure.text) < 100_000
    assert "in deep" in failure.text
    many = shorten(failure_of(rank, ValueError(f"words of {rank}")) for rank in reversed(range(2000)))
    assert [one.rank for one in many] == list(range(2000))
    assert many[-1].text == "ValueError: words of 1999"

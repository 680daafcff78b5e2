"""Phases on real ranks: what they return, that they do not mix, and that nothing stays behind."""

from __future__ import annotations

import threading
import time
import uuid

import pytest
import torch.distributed as dist

from dcp_ranks import make_coordinator
from dcp_ranks.errors import (
    CoordinatorTimeoutError,
)
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.transport.store_wire import CHUNK_BYTES
from integration_tests.kits.coordinators import (
    KINDS,
    STORE_KINDS,
    caught,
    coordinator,
    group_store,
    hear,
    leftover_keys,
    say,
)


def every_move(kind, coordinator_rank):
    rank = dist.get_rank()
    with coordinator(kind, coordinator_rank=coordinator_rank) as them:
        return (
            them.is_coordinator,
            them.reduce_scatter("a", lambda: rank * 10, lambda values: [value + 1 for value in values]),
            them.all_reduce("a", lambda: rank, lambda values: (values, rank)),
            them.all_gather("b", lambda: "x" * rank),
            them.broadcast("c", lambda: f"from {rank}"),
            them.barrier("d"),
            them.all_gather("nothing", lambda: None),
            them.agree("same", lambda: {"id": "a"}, "ids"),
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "lead"), [(2, 0), (4, 0), (4, 3)])
def test_values(ranks, kind, world_size, lead):
    numbers = list(range(world_size))
    for rank, found in enumerate(ranks.run(world_size, every_move, kind, lead)):
        assert found == (
            rank == lead,
            rank * 10 + 1,
            (numbers, lead),
            ["x" * number for number in numbers],
            f"from {lead}",
            None,
            [None] * world_size,
            None,
        )


def phase_inside(kind):
    with coordinator(kind) as them:
        return them.all_reduce("outer", lambda: them.all_reduce("inner", lambda: 1, sum) + 10, sum)


@pytest.mark.parametrize("kind", KINDS)
def test_a_phase_may_run_inside_the_local_part_of_another(ranks, kind):
    assert ranks.run(2, phase_inside, kind) == [24, 24]


def big_values(kind, sizes):
    with coordinator(kind) as them:
        rank = dist.get_rank()
        gathered = [them.all_gather("big", lambda size=size: bytes([rank]) * size) for size in sizes]
        scattered = [
            them.reduce_scatter("big", lambda: None, lambda _, size=size: [bytes([r]) * size for r in range(2)])
            for size in sizes
        ]
    return gathered == [[bytes([r]) * size for r in range(2)] for size in sizes] and scattered == [
        bytes([rank]) * size for size in sizes
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_any_size(ranks, kind):
    around = [CHUNK_BYTES * number + more for number in (1, 3) for more in (-100, -1, 0, 1)]
    assert all(ranks.run(2, big_values, kind, [0, 1, *around, 20_000_000]))


def nothing_left(kind):
    for number in range(3):
        with coordinator(kind) as them:
            them.save_nonce()
            them.reduce_scatter("plan", lambda: bytes(3_000_000), lambda values: values)
            them.all_gather("write", lambda: bytes(1_500_000))
            if number == 1:
                caught(lambda: them.barrier("x") if dist.get_rank() else them.all_gather("y", lambda: 1))
            if number == 2:
                caught(lambda: them.all_gather("x", lambda: bytes(3_000_000) if dist.get_rank() else 1 / 0))
    return leftover_keys()


@pytest.mark.parametrize("kind", STORE_KINDS)
def test_keys_are_removed(ranks, kind):
    assert ranks.run(4, nothing_left, kind) == [[]] * 4


def sub_groups(kind):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    group = groups[rank % 2]
    options = {"process_group": group} if kind != "collective" else {"group": group}
    with coordinator(kind, coordinator_rank=1, **options) as them:
        values = them.all_gather("x", lambda: rank)
        lead = them.broadcast("y", lambda: rank)
        error = caught(lambda: them.barrier("z") if rank != 2 else them.all_gather("z", lambda: 1 / 0))
    outside = caught(lambda: make_coordinator(groups[1 - rank % 2]))
    return values, lead, error, outside


@pytest.mark.parametrize("kind", KINDS)
def test_sub_groups(ranks, kind):
    for rank, (values, lead, error, outside) in enumerate(ranks.run(4, sub_groups, kind)):
        members = [0, 2] if rank % 2 == 0 else [1, 3]
        assert values == members
        assert lead == members[1]
        assert type(outside) is ValueError
        assert (list(error.failures) == [1]) if rank % 2 == 0 else (error is None)


def many_in_flight(kind, count):
    rank = dist.get_rank()
    found = {}
    open_ones = [coordinator(kind) for _ in range(count)]

    def run(number, them):
        with them:
            got = []
            for step in range(4):
                time.sleep(0.001 * ((number * 7 + step * 5 + rank * 3) % 11))
                got.append(them.all_gather(f"step {step}", lambda step=step: (number, step, rank)))
            nonces = them.all_gather("nonces", them.save_nonce) if kind != "collective" else None
            fails = number % 3 == 0 and rank == 0
            error = caught(lambda: them.all_gather("last", lambda: 1 / 0 if fails else 1))
            found[number] = (got, nonces, error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(open_ones)]
    for thread in threads[:: 1 if rank % 2 else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    return found, leftover_keys() if kind != "collective" else []


@pytest.mark.parametrize("kind", KINDS)
def test_several_operations_in_flight_do_not_mix(ranks, kind):
    count = 6
    everything = ranks.run(3, many_in_flight, kind, count)
    nonces = set()
    for found, left in everything:
        assert left == []
        for number in range(count):
            got, nonce, error = found[number]
            assert got == [[(number, step, rank) for rank in range(3)] for step in range(4)]
            assert (list(error.failures) == [0]) if number % 3 == 0 else (error is None)
            if nonce is not None:
                assert len(set(nonce)) == 1
                nonces.add(nonce[0])
    assert len(nonces) == (0 if kind == "collective" else count)


def nonce_alone():
    """Rank 0 ends its operation before rank 1 starts it."""
    store = group_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 is done"])
    with make_coordinator() as them:
        nonce = them.save_nonce()
    store.set("rank 0 is done", "yes")
    return nonce, leftover_keys()


def test_a_nonce_waits_for_no_rank(ranks):
    (first, left), (second, _) = ranks.run(2, nonce_alone)
    assert first == second
    assert len(first) == 16
    assert left == []


def over_another_store(path, word):
    store = dist.FileStore(path, 2)
    with StoreCoordinator(dist.PrefixStore("mine", store.clone()), dist.get_rank(), 2) as them:
        values = them.all_gather("x", lambda: bytes(CHUNK_BYTES + 1))
        nonce = them.all_gather("y", them.save_nonce)
    with StoreCoordinator(dist.PrefixStore("late", store.clone()), dist.get_rank(), 2, timeout_seconds=2) as them:
        error = caught(lambda: them.barrier("z") if them.rank else hear(word))
        say(word)
    return len(values), len(set(nonce)), error


@pytest.mark.newest
def test_a_file_store_will_do(ranks, tmp_path):
    found = ranks.run(2, over_another_store, str(tmp_path / "store"), uuid.uuid4())
    assert [(count, nonces) for count, nonces, _ in found] == [(2, 1)] * 2
    assert type(found[1][2]) is CoordinatorTimeoutError
    assert found[1][2].ranks == (0,)


@pytest.mark.newest
def test_threads_over_a_hash_store():
    store = dist.HashStore()
    found = {}

    def run(rank):
        with StoreCoordinator(store.clone(), rank, 3) as them:
            found[rank] = them.reduce_scatter("x", lambda: rank, lambda values: [value * 2 for value in values])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 0, 1: 2, 2: 4}
    assert store.num_keys() == 3  # only how many operations each rank has begun

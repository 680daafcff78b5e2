"""Ranks in virtual time: `save` and `load` themselves, deaths, and a disk that forgets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from dcp_core import load, load_keys, save
from dcp_core.records.metadata import TensorProperties
from dcp_core.shards.shards import LocalShard, LocalTensor
from dcp_core.testing.rehearsal.clock import Clock
from dcp_core.testing.rehearsal.job import WRITING, Job
from dcp_core.testing.rehearsal.storage import Disk, VirtualStore
from dcp_core.testing.rehearsal.world import Cluster, VirtualReader, VirtualWriter, World
from dcp_io.saves.cleanup import remove_leftovers
from dcp_io.workers import StopSignal, run_together
from dcp_ranks import CoordinatorTimeoutError, PeerLostError, PeerOptions

COLUMNS = 8


def cut(values: torch.Tensor, rank: int) -> LocalTensor:
    """One row of a tensor."""
    row = values[rank : rank + 1].clone()
    shard = LocalShard(torch.Size((rank, 0)), row.shape, lambda: row)
    return LocalTensor(values.shape, TensorProperties(values.dtype), False, (shard,))


def rows(ranks: int) -> torch.Tensor:
    return torch.arange(float(ranks * COLUMNS)).reshape(ranks, COLUMNS)


def save_all(world: World, rank: int) -> None:
    state = {"rows": cut(rows(world.cluster.ranks), rank), "same": torch.ones(3), "step": 5}
    save(state, storage_writer=VirtualWriter(world, "run"))


def load_all(world: World, rank: int) -> bool:
    ranks = world.cluster.ranks
    state: dict[str, Any] = {"rows": cut(torch.zeros(ranks, COLUMNS), rank), "same": torch.zeros(3), "step": 0}
    load(state, storage_reader=VirtualReader(world, "run"))
    (shard,) = state["rows"].shards
    return torch.equal(shard.get()[0], rows(ranks)[rank]) and state["step"] == 5


def results(tasks: Any) -> list[Any]:
    for task in tasks:
        if task.error is not None:
            raise task.error
    return [task.result for task in tasks]


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(1),
        Cluster(3, 2),
        Cluster(64),
        Cluster(24, 4, peers=PeerOptions(leaders_above=8, fan_out=2)),
    ],
    ids=["alone", "few", "many", "leaders"],
)
def test_ranks_load_what_they_have_saved(cluster: Cluster) -> None:
    world = World(cluster)
    results(world.run(lambda rank: save_all(world, rank)))
    assert all(results(world.run(lambda rank: load_all(world, rank))))
    with world.installed():
        assert torch.equal(load_keys(storage_reader=VirtualReader(world, "run"))["rows"], rows(cluster.ranks))


def history(seed: int) -> object:
    """Everything that one save did."""
    world = World(Cluster(6, 2, peers=PeerOptions(leaders_above=4)), seed)
    results(world.run(lambda rank: save_all(world, rank), starts=[0.01 * rank for rank in range(6)]))
    files = {path: bytes(file.data) for path, file in world.disk.files.items()}
    return world.phases, world.network.traffic, files, world.clock.steps


def test_a_seed_repeats_a_save_bit_for_bit() -> None:
    assert history(1) == history(1)
    assert history(1) != history(2)


def test_an_hour_of_waiting_takes_no_time() -> None:
    world = World(Cluster(3, timeout_seconds=3600.0))
    started = time.monotonic()
    tasks = world.run(lambda rank: save_all(world, rank) if rank < 2 else world.clock.pause(1e5))
    assert world.clock.now >= 1e5
    assert time.monotonic() - started < 600
    for task in tasks[:2]:
        assert isinstance(task.error, CoordinatorTimeoutError)
        assert task.error.ranks == (2,)


@pytest.mark.parametrize("leaders_above", [256, 1])
def test_a_killed_rank_is_named_on_all_others(leaders_above: int) -> None:
    world = World(Cluster(4, 2, peers=PeerOptions(leaders_above=leaders_above)))
    world.clock.at_step[60] = lambda: world.network.kill([3])
    tasks = world.run(lambda rank: save_all(world, rank))
    assert isinstance(tasks[3].error, SystemExit)
    for task in tasks[:3]:
        assert isinstance(task.error, PeerLostError)
        assert task.error.ranks == (3,)
    assert not [path for path in world.disk.files if path.endswith(".metadata")]


def test_a_killed_rank_sends_nothing_any_more() -> None:
    world = World(Cluster(4, 2, peers=PeerOptions(leaders_above=1)))
    sent: list[int] = []

    def kill() -> None:
        world.network.kill([3])
        sent.append(world.network.traffic[3].frames)

    world.disk.at_operation[15] = kill  # ranks write
    tasks = world.run(lambda rank: save_all(world, rank))
    assert isinstance(tasks[3].error, SystemExit)
    assert sent == [world.network.traffic[3].frames]


def test_a_task_plays_moments_until_it_is_killed() -> None:
    clock, seen = Clock(0), []

    def moments() -> Iterator[float]:
        for number in range(4):
            seen.append((number, clock.now))
            yield number + 1.0

    clock.at(2.5, lambda: clock.kill(clock.tasks[0]))
    killed, other = clock.run([lambda: clock.play(moments()), lambda: clock.pause(9.0)])
    assert seen == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert isinstance(killed.error, SystemExit)
    assert (other.error, clock.now) == (None, 9.0)
    clock.play(moments())  # outside of the simulation, no time passes
    assert seen[3:] == [(number, 9.0) for number in range(4)]


def test_a_killed_task_changes_nothing_any_more() -> None:
    disk = Disk(Clock(0))
    store = VirtualStore(disk, "run")

    def work() -> None:
        try:
            disk.clock.pause(10.0)
        finally:
            with suppress(OSError):
                store.publish("note", b"from a dead process")

    disk.clock.at(5.0, lambda: disk.clock.kill(disk.clock.tasks[0]))
    (task,) = disk.clock.run([work])
    assert isinstance(task.error, SystemExit)
    assert disk.files == {}
    assert disk.clock.now == 5.0


@pytest.mark.parametrize("killed", [False, True])
def test_threads_of_a_task_take_virtual_time_and_die_with_it(killed: bool) -> None:
    world = World(Cluster(1, disk_seconds=1.0))
    store = world.store("run")
    done: list[int] = []

    def part(number: int, stop: StopSignal) -> None:
        store.publish(str(number), b"", sync=False)
        done.append(number)
        stop.check()

    if killed:
        world.clock.at(0.5, lambda: world.clock.kill(world.clock.tasks[0]))
    (task,) = world.run(lambda _: run_together([partial(part, number) for number in range(8)]))
    assert isinstance(task.error, SystemExit if killed else type(None))
    assert (sorted(done), len(world.disk.files)) == (([], 0) if killed else ([*range(8)], 8))
    assert world.clock.now == (0.5 if killed else 1.0)
    with world.installed():
        run_together([lambda _: done.append(8)] * 2)  # outside of the simulation
    assert done[-2:] == [8, 8]


def test_a_dead_save_of_many_ranks_is_removed_in_parallel() -> None:
    world = World(Cluster(64, 8, disk_seconds=1.0))
    for rank in range(64):
        world.store("run").publish(f"__{rank}_0.dead.distcp", b"")

    def remove(_: int) -> None:
        remove_leftovers(world.store("run"), "dead", world.store("run").list())

    before = world.clock.now
    results(world.run(lambda rank: remove(rank) if rank == 0 else None))
    assert world.disk.files == {}
    assert world.clock.now - before == 1 + 64 / 8  # a listing, and deletions by eight threads


def test_a_crash_keeps_what_was_synced_alone() -> None:
    seen = set()
    for seed in range(40):
        disk = Disk(Clock(seed))
        store = VirtualStore(disk, "run")
        store.publish("index", b"whole")
        for name, sync in (("synced", True), ("loose", False)):
            sink = store.create(name, sync=sync)
            sink.write([b"bytes"])
            sink.close()
        store.sync_folder()
        store.create("later").close()
        disk.crash()
        assert store.read("index") == b"whole"
        assert store.read("synced") == b"bytes"
        assert b"bytes".startswith(store.read("loose"))
        seen.add((len(store.read("loose")), store.exists("later")))
    assert len(seen) > 6


def test_requests_wait_for_a_busy_disk() -> None:
    world = World(Cluster(2, 1, disk_seconds=0.0, host_bytes_per_second=100.0, disk_bytes_per_second=100.0))

    def write(rank: int) -> float:
        VirtualStore(world.disk, "run").publish(str(rank), bytes(50))
        return world.clock.now

    assert sorted(results(world.run(write))) == [0.5, 1.0]
    assert world.disk.whole.busy_seconds == 1.0


SHAPES = [("a.w", (24, 50), "bfloat16"), ("b.w", (10, 7), "float32"), ("c.w", (3,), "int64"), ("scale", (), "float32")]


@pytest.mark.parametrize("ranks", [4, 144])
def test_tensors_without_bytes_take_the_messages_and_files_of_real_ones(ranks: int) -> None:
    """From 128 ranks on, plans are sent as what differs between them."""

    def real_state(rank: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, shape, dtype in SHAPES:
            values = torch.zeros(shape, dtype=getattr(torch, dtype))
            rows = -(-shape[0] // ranks) if shape else 0
            part = values[rank * rows : (rank + 1) * rows] if shape else values
            offsets = torch.Size((rank * rows, *[0] * (len(shape) - 1)))
            shards = (LocalShard(offsets, part.shape, part.detach),) if part.numel() else ()
            cut_up = LocalTensor(values.shape, TensorProperties(values.dtype), False, shards, shared=False)
            made[name] = cut_up if shape else values
        return made

    def outcome(world: World) -> object:
        sizes = {path.partition(".")[0]: file.size for path, file in world.disk.files.items() if "distcp" in path}
        index = [file.size for path, file in world.disk.files.items() if path.endswith(".metadata")]
        counts = [(one.requests - one.deletions, one.set_bytes, one.frames) for one in world.network.traffic]
        phases = [name for _, name, *_ in world.phases if name != WRITING]
        return sizes, index, [sum(each) for each in zip(*counts, strict=True)], sorted(phases)

    real, rehearsed = World(Cluster(ranks, 4)), World(Cluster(ranks, 4))
    results(real.run(lambda rank: save(real_state(rank), storage_writer=VirtualWriter(real, "run"))))
    job = Job(rehearsed, SHAPES, "run")
    results(job.run())
    assert job.whole_ranks < min(ranks, 8)
    assert outcome(rehearsed) == outcome(real)
    with real.installed():
        loaded = load_keys(storage_reader=VirtualReader(real, "run"))
    assert all(loaded[name].shape == shape for name, shape, _ in SHAPES)

"""What lets another process save on behalf of a rank: values that stand for others, copies of writers and planners."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, init_device_mesh

from dcp_base.hookspecs import CheckpointEvent
from dcp_core import DefaultSavePlanner, PlanError, hookimpl, load, plugins, save
from dcp_core.objects.object_bytes import DumpedObject, dump_object
from dcp_core.records.metadata import TensorProperties
from dcp_core.saving import save_with
from dcp_core.shards.shards import LocalShard, LocalTensor, local_tensor
from dcp_core.state_dict.flatten import flatten
from dcp_ranks.choose_coordinator import assume_job_size, job_size
from dcp_ranks.phases.coordinator import LocalCoordinator
from dcp_ranks.testing.ranks import RankPool
from integration_tests.kits.memory import MemoryReader, MemoryWriter


def _half(values: torch.Tensor, first: int, rows: int) -> LocalTensor:
    """Rows of a tensor of 4 × 2, as a rank holds them."""
    shard = LocalShard(torch.Size((first, 0)), torch.Size((rows, 2)), lambda: values)
    return LocalTensor(torch.Size((4, 2)), TensorProperties(torch.float32), False, (shard,))


def test_a_local_tensor_stands_for_the_tensor_it_describes() -> None:
    state = {"list": [_half(torch.arange(8.0).reshape(4, 2), 0, 4)], "n": 1}
    assert list(flatten(state).values) == ["list.0", "n"]
    save(state, storage_writer=MemoryWriter("local"))
    found = {"list": [torch.zeros(4, 2)], "n": 0}
    load(found, storage_reader=MemoryReader("local"))
    assert found["list"][0].tolist() == torch.arange(8.0).reshape(4, 2).tolist()  # type: ignore[index]


def _as_dtensor() -> bool:
    mesh = init_device_mesh("cpu", (2,))
    value = DTensor.from_local(torch.ones(2, 2), mesh, [torch.distributed.tensor.Shard(0)])
    held = local_tensor("x", value)
    assert held is not None
    one = save({"x": value}, storage_writer=MemoryWriter("as-dtensor"))
    other = save({"x": held}, storage_writer=MemoryWriter("as-dtensor"))
    # This storage is in the memory of each process.
    return torch.distributed.get_rank() == 1 or one.state_dict_metadata == other.state_dict_metadata


def test_metadata_is_that_of_the_dtensor(ranks: RankPool) -> None:
    assert ranks.run(2, _as_dtensor) == [True, True]


def test_a_dumped_object_is_written_as_it_is() -> None:
    data = dump_object({"a": (1, 2)}, key="o")
    save({"o": DumpedObject(data)}, storage_writer=MemoryWriter("dumped"))
    found: dict[str, Any] = {"o": None}
    load(found, storage_reader=MemoryReader("dumped"))
    assert found["o"] == {"a": (1, 2)}


def test_a_rank_of_a_larger_job_may_hold_a_part() -> None:
    assert job_size() == 1
    part = {"x": _half(torch.ones(2, 2), 0, 2)}
    with pytest.raises(PlanError, match="x"):
        save(part, storage_writer=MemoryWriter("part"))
    with assume_job_size(2):
        assert job_size() == 2
        save(part, storage_writer=MemoryWriter("part"))
    assert job_size() == 1


def test_copies_of_planners_and_writers_begin_anew() -> None:
    planner, writer = DefaultSavePlanner(replicas="ignore"), MemoryWriter("first", overwrite=False)
    save({"w": torch.ones(1000)}, storage_writer=writer, planner=planner)
    pickled = pickle.dumps((planner.without_values(), writer))
    assert len(pickled) < 1000
    again, other = pickle.loads(pickled)
    assert again.replicas == "ignore"
    assert other.checkpoint_id == "first"
    with pytest.raises(FileExistsError):
        save({"w": torch.ones(2)}, storage_writer=other, planner=again)
    other.reset("second")
    assert other.storage_meta().save_id not in (None, writer.save_id)  # there from the start, as in stock
    save({"w": torch.ones(2)}, storage_writer=other, planner=again)


def test_metadata_of_a_save_by_its_id() -> None:
    writer = MemoryWriter("by-id")
    save({"w": torch.ones(2)}, storage_writer=writer)
    save_id = writer.storage_meta().save_id  # type: ignore[union-attr]
    found = MemoryWriter("by-id").published_metadata(save_id)
    assert list(found.state_dict_metadata) == ["w"]
    with pytest.raises(FileNotFoundError, match="replaced"):
        MemoryWriter("by-id").published_metadata("another")


def test_save_with_closes_its_coordinator() -> None:
    class Watched(LocalCoordinator):
        closed = 0

        def close(self) -> None:
            Watched.closed += 1

    save_with(Watched(), {"w": torch.ones(2)}, storage_writer=MemoryWriter("closed"))
    with pytest.raises(Exception, match="no place to save to"):
        save_with(Watched(), {"w": torch.ones(2)})
    assert Watched.closed == 2


def test_events_can_be_diverted() -> None:
    told: list[CheckpointEvent] = []

    class Observer:
        def __init__(self) -> None:
            self.seen = 0

        @hookimpl
        def dcp_on_event(self, event: CheckpointEvent) -> None:
            self.seen += 1

    observer = Observer()
    plugins.register(observer, name="watcher")
    try:
        plugins.divert_events(told.append)
        save({"w": torch.ones(2)}, storage_writer=MemoryWriter("events"))
        assert told
        assert observer.seen == 0
        plugins.divert_events(None)
        save({"w": torch.ones(2)}, storage_writer=MemoryWriter("events"))
        assert observer.seen == len(told)
    finally:
        plugins.divert_events(None)
        plugins.unregister("watcher")

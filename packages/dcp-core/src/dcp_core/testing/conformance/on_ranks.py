"""Tests on two ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dcp_core.errors import CheckpointException, CheckpointNotFoundError, DcpError
from dcp_core.testing.conformance.folder import Door, RawFolder, StorageFixtures
from dcp_core.testing.conformance.states import FailingPlanner, blank
from dcp_core.testing.sharding import distribute
from dcp_core.testing.trees import same

__all__ = ["RankTests"]

_ROWS, _COLUMNS = 1001, 600
_SLACK_BYTES = 1 << 20

State: TypeAlias = dict[str, Any]


class RankTests(StorageFixtures):
    """Tests of saves and loads on two ranks."""

    def test_ranks_load_what_ranks_saved(self, ranks: Any, door: Door) -> None:
        ranks.run(2, save_on_ranks, door, 1.0, (Shard(0),))
        for placement in (Shard(0), Shard(1), Replicate()):
            assert ranks.run(2, load_on_ranks, door, 1.0, (placement,)) == [True, True]
        template = blank(whole(1.0))
        door.load(template)
        assert same(template, whole(1.0))

    def test_ranks_load_what_one_process_saved(
        self, ranks: Any, storage: Door, bytes_given: Callable[[], int] | None
    ) -> None:
        storage.save(whole(1.0))
        before = bytes_given() if bytes_given is not None else 0
        read_bytes = ranks.run(2, load_part, storage, 1.0, (Shard(0),))
        tensor_bytes = whole(1.0)["sharded"].nbytes
        assert all(tensor_bytes // 2 <= count <= tensor_bytes // 2 + _SLACK_BYTES for count in read_bytes)
        if bytes_given is not None:
            assert tensor_bytes <= bytes_given() - before <= tensor_bytes + 2 * _SLACK_BYTES

    def test_each_rank_reads_only_the_files_that_it_needs(self, ranks: Any, storage: Door, raw: RawFolder) -> None:
        ranks.run(2, save_on_ranks, storage, 1.0, (Shard(0),))
        keys = self.data_files(storage.checkpoint_id)
        (name,) = [name for name, held in keys.items() if "object0" in held]
        raw.delete(name)
        template = {"object1": None}
        if self.needs_all_files is not None:
            with pytest.raises(CheckpointNotFoundError, match=name):
                storage.load(template)
            return
        storage.load(template)
        assert template == {"object1": whole(1.0)["object1"]}

    def test_ranks_replace_what_ranks_saved(self, ranks: Any, door: Door, raw: RawFolder) -> None:
        ranks.run(2, save_on_ranks, door, 1.0, (Shard(0),))
        index = self.index_files(door.checkpoint_id, raw)
        for value, placement in ((2.0, Shard(1)), (3.0, Replicate()), (4.0, Shard(0))):
            before = set(raw.names()) - set(index)
            ranks.run(2, save_on_ranks, door, value, (placement,))
            assert self.index_files(door.checkpoint_id, raw) == index
            assert before.isdisjoint(raw.names())
            assert ranks.run(2, load_on_ranks, door, value, (Shard(1),)) == [True, True]

    @pytest.mark.parametrize("failing_rank", [0, 1])
    def test_one_ranks_failure_is_everybodys(
        self, ranks: Any, storage: Door, raw: RawFolder, failing_rank: int
    ) -> None:
        ranks.run(2, save_on_ranks, storage, 1.0, (Shard(0),))
        before = {name: raw.get(name) for name in raw.names()}
        failed = ranks.run(2, fail_on_ranks, storage, 2.0, failing_rank)
        assert failed == [[failing_rank], [failing_rank]]
        assert {name: raw.get(name) for name in raw.names()} == before
        assert ranks.run(2, load_on_ranks, storage, 1.0, (Shard(0),)) == [True, True]

    def test_the_death_of_a_job_keeps_the_old_checkpoint(self, ranks: Any, storage: Door, raw: RawFolder) -> None:
        ranks.run(2, save_on_ranks, storage, 1.0, (Shard(0),))
        index = self.index_files(storage.checkpoint_id, raw)
        ranks.run(2, die_on_ranks, storage, 2.0, expect_death=[0, 1])
        assert ranks.run(2, load_on_ranks, storage, 1.0, (Shard(0),)) == [True, True]
        ranks.run(2, save_on_ranks, storage, 3.0, (Shard(0),))
        assert ranks.run(2, load_on_ranks, storage, 3.0, (Shard(0),)) == [True, True]
        assert self.index_files(storage.checkpoint_id, raw) == index

    def test_ranks_save_without_collectives(self, ranks: Any, door: Door, raw: RawFolder) -> None:
        if self.needs_collectives is not None:
            for message in ranks.run(2, refuse_without_collectives, door):
                assert "use_collectives=True" in message
            assert raw.names() == []
            return
        ranks.run(2, save_on_ranks, door, 1.0, (Shard(0),), False)
        assert ranks.run(2, load_on_ranks, door, 1.0, (Shard(1),)) == [True, True]
        objects = len(raw.names())
        ranks.run(2, save_on_ranks, door, 2.0, (Shard(0),), False)
        template = blank(whole(2.0))
        door.load(template)
        assert same(template, whole(2.0))
        assert len(raw.names()) == objects

    def test_a_damaged_shard_is_refused_on_all_ranks(self, ranks: Any, storage: Door, raw: RawFolder) -> None:
        ranks.run(2, save_on_ranks, storage, 1.0, (Shard(0),))
        keys = self.data_files(storage.checkpoint_id)
        name = max(name for name, held in keys.items() if "sharded" in held)
        content = bytearray(raw.get(name))
        content[len(content) // 2] ^= 1
        raw.put(name, bytes(content))
        for message in ranks.run(2, refuse_on_ranks, storage):
            assert "CorruptCheckpointError" in message
            assert name in message
            assert "sharded" in message


def whole(value: float) -> State:
    """Return the global state dict."""
    rows = torch.arange(float(_ROWS)).unsqueeze(1)
    return {
        "sharded": rows * _COLUMNS + torch.arange(float(_COLUMNS)) + value,
        "replicated": torch.full((30, 50), value),
        "object0": f"rank 0: {value}",
        "object1": f"rank 1: {value}",
    }


def part(value: float, placements: tuple[Placement, ...]) -> State:
    """Return this rank's part of `whole(value)`."""
    full = whole(value)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "sharded": distribute(full["sharded"], mesh, placements),
        "replicated": full["replicated"],
        f"object{rank}": full[f"object{rank}"],
    }


def save_on_ranks(door: Door, value: float, placements: tuple[Placement, ...], use_collectives: bool = True) -> None:
    """Save this rank's part."""
    door.save(part(value, placements), use_collectives=use_collectives)


def refuse_without_collectives(door: Door) -> str:
    """Return the error of a save without collectives."""
    try:
        save_on_ranks(door, 1.0, (Shard(0),), False)
    except DcpError as error:
        return str(error)
    return "saved"


def load_on_ranks(door: Door, value: float, placements: tuple[Placement, ...]) -> bool:
    """Return whether this rank's part is loaded correctly."""
    template, wanted = part(0.0, placements), part(value, placements)
    template[f"object{dist.get_rank()}"] = None
    door.load(template)
    local, wanted_local = template["sharded"].to_local(), wanted["sharded"].to_local()
    return same({**template, "sharded": local}, {**wanted, "sharded": wanted_local})


def load_part(door: Door, value: float, placements: tuple[Placement, ...]) -> int:
    """Return the bytes that load this shard, -1 for a wrong value."""
    template = {"sharded": part(0.0, placements)["sharded"]}
    report = door.load(template)
    right = same(template["sharded"].to_local(), part(value, placements)["sharded"].to_local())
    return report.bytes_read + report.bytes_received if right else -1


def fail_on_ranks(door: Door, value: float, failing_rank: int) -> list[int]:
    """Return the error's ranks of a save that fails on one."""
    planner = FailingPlanner(f"object{failing_rank}")
    try:
        door.save(part(value, (Shard(0),)), planner=planner)
    except CheckpointException as error:
        return list(error.failures)
    return []


def die_on_ranks(door: Door, value: float) -> None:
    """Kill this process during a save's writes."""

    def die() -> None:
        try:
            dist.barrier()  # otherwise one rank's death could end another's save before it writes
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    door.save(part(value, (Shard(0),)), planner=FailingPlanner(f"object{dist.get_rank()}", die))


def refuse_on_ranks(door: Door) -> str:
    """Return the error of loading a damaged checkpoint."""
    try:
        door.load(part(0.0, (Shard(0),)))
    except DcpError as error:
        return str(error)
    return "loaded"

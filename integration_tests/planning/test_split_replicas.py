"""Replicated tensors written in parts by several ranks: level files, and the same checkpoint for us and for stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_all as dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MIB = 1 << 20
ROWS = 3 * MIB // 64


def values() -> dict[str, torch.Tensor]:
    maker = torch.Generator().manual_seed(3)
    return {
        "embedding": torch.randn(ROWS, 64, generator=maker),  # 12 MiB
        "strided": torch.randn(64, ROWS, generator=maker).t(),
        "flat": torch.randint(0, 99, (1, 1, 5 * MIB), generator=maker, dtype=torch.uint8),
        "small": torch.randn(100, generator=maker),
    }


class Renaming(dcp.DefaultSavePlanner):
    """Looks at its items, so that its plan consists of records."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        assert all(item.index.fqn for item in plan.items)
        return plan


class Doubling(dcp.DefaultSavePlanner):
    """Writes something else than what lies in the state dict: only whole."""

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
        return super().transform_object(write_item, object * 2 if isinstance(object, torch.Tensor) else object)


def save(folder: str, planners: list[type[dcp.DefaultSavePlanner]], options: dict[str, Any]) -> list[int]:
    """The number of chunks of each tensor."""
    planner = planners[dist.get_rank() % len(planners)](**options)
    dcp.save(values(), checkpoint_id=folder, planner=planner)
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return [len(entries[name].chunks) for name in values()]


def bytes_by_rank(folder: Path, world: int) -> list[int]:
    return [sum(file.stat().st_size for file in folder.glob(f"__{rank}_*")) for rank in range(world)]


def holds(folder: Path, library: Any, factor: int = 1) -> bool:
    template = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in values().items()}
    library.load(template, storage_reader=library.FileSystemReader(folder), no_dist=True)
    return all(torch.equal(template[name], value * factor) for name, value in values().items())


@pytest.mark.parametrize("planners", [[dcp.DefaultSavePlanner], [dcp.DefaultSavePlanner, Renaming]], ids=["", "mixed"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_write_the_same_number_of_bytes(ranks: Any, tmp_path: Path, world: int, planners: Any) -> None:
    folder = tmp_path / "checkpoint"
    counts = ranks.run(world, save, str(folder), planners, {})[0]
    assert sum(counts) > len(counts)
    assert counts[3] == 1
    sizes = bytes_by_rank(folder, world)
    assert max(sizes) < min(sizes) + 2 * MIB
    assert holds(folder, dcp)
    assert holds(folder, stock)


@pytest.mark.parametrize(
    ("planner", "options", "factor"),
    [(Doubling, {}, 2), (dcp.DefaultSavePlanner, {"dedup_save_to_lowest_rank": True}, 1)],
)
def test_nothing_is_cut_where_it_must_not_be(
    ranks: Any, tmp_path: Path, planner: Any, options: Any, factor: int
) -> None:
    folder = tmp_path / "checkpoint"
    assert ranks.run(2, save, str(folder), [planner], options)[0] == [1, 1, 1, 1]
    assert holds(folder, dcp, factor)
    assert holds(folder, stock, factor)


def save_hybrid(folder: str) -> int:
    """Sharded over two ranks, replicated over two pairs, as HSDP has it."""
    mesh = init_device_mesh("cpu", (2, 2))
    value = distribute_tensor(values()["embedding"], mesh, [Replicate(), Shard(1)])
    dcp.save({"embedding": value}, checkpoint_id=folder)
    loaded = DTensor.from_local(torch.zeros_like(value.to_local()), mesh, value.placements)
    dcp.load({"embedding": loaded}, checkpoint_id=folder)
    assert torch.equal(loaded.to_local(), value.to_local())
    return len(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["embedding"].chunks)


def test_replicated_shards_are_cut_too(ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    assert ranks.run(4, save_hybrid, str(folder))[0] == 4
    sizes = bytes_by_rank(folder, 4)
    assert max(sizes) < 1.02 * min(sizes)
    template = {"embedding": torch.zeros(ROWS, 64)}
    stock.load(template, storage_reader=stock.FileSystemReader(folder), no_dist=True)
    assert torch.equal(template["embedding"], values()["embedding"])

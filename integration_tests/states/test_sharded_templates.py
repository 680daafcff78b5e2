"""ShardedTensors as templates of loads: any number of shards on a rank, none included, nested in dicts and lists.

Most methods of such a tensor raise where it does not have exactly one shard.
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp

ROWS = 11
VALUES = torch.arange(ROWS * 2.0).view(ROWS, 2)


def sharded(owners: list[int]) -> Any:
    """Zeros, cut along the rows into as many shards as there are owners."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in owners])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deprecating ShardedTensor", category=FutureWarning)
        return sharded_tensor.zeros(spec, ROWS, 2)


def wanted(shard: Any) -> torch.Tensor:
    first, rows = shard.metadata.shard_offsets[0], shard.tensor.shape[0]
    return VALUES[first : first + rows]


def round_trip(folder: str, saved: list[int], loaded: list[int]) -> bool:
    source = sharded(saved)
    for shard in source.local_shards():
        shard.tensor.copy_(wanted(shard))
    dcp.save({"nested": {"of": source}, "listed": [source, 3]}, checkpoint_id=folder)
    template = {"nested": {"of": sharded(loaded)}, "listed": [sharded(loaded), 0]}
    dcp.load(template, checkpoint_id=folder)
    tensors = [template["nested"]["of"], template["listed"][0]]  # type: ignore[index,call-overload]
    same = all(torch.equal(shard.tensor, wanted(shard)) for tensor in tensors for shard in tensor.local_shards())
    return same and sum(shard.tensor.shape[0] for shard in tensors[0].local_shards()) == rows_here(loaded)


def rows_here(owners: list[int]) -> int:
    size = -(-ROWS // len(owners))
    bounds = [(min(ROWS, size * i), min(ROWS, size * (i + 1))) for i in range(len(owners))]
    return sum(end - begin for owner, (begin, end) in zip(owners, bounds, strict=True) if owner == dist.get_rank())


def round_trips(folder: str, cases: list[tuple[list[int], list[int]]]) -> list[bool]:
    return [round_trip(f"{folder}/{number}", *case) for number, case in enumerate(cases)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_templates_with_any_number_of_shards(ranks: Any, tmp_path: Path, world_size: int) -> None:
    rng = random.Random(world_size)
    cases = [([0], [0, world_size - 1, 0]), ([0, 0, world_size - 1], [world_size - 1])]
    cases += [([rng.randrange(world_size) for _ in range(rng.randint(1, 6))] for _ in range(2)) for _ in range(8)]  # type: ignore[misc]
    cases = [(list(saved), list(loaded)) for saved, loaded in cases]
    for found in ranks.run(world_size, round_trips, str(tmp_path), cases):
        assert found == [True] * len(cases)

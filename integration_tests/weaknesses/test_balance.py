"""Entries C3 and C9 of stock's measured weaknesses: what is staged of a view, and whose bytes count as a load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans as stock_dedup
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import dcp_all as dcp
from dcp_core.tables.value_table import local_values
from dcp_io.requests import WriteRequest
from dcp_io.writing.write_engine import assign_to_threads

MIB = 1 << 20
RANKS, REPLICAS = 64, 64


def _item(library: Any, name: str, start: int, size: int, whole: int) -> Any:
    kinds = library.planner.WriteItemType
    chunk = library.metadata.ChunkStorageMetadata(torch.Size([start]), torch.Size([size]))
    properties = library.metadata.TensorProperties(torch.int8)
    data = library.planner.TensorWriteData(chunk, properties, torch.Size([whole]))
    index = library.metadata.MetadataIndex(name, torch.Size([start]))
    return library.planner.WriteItem(index, kinds.SHARD if size < whole else kinds.TENSOR, tensor_data=data)


def _items(library: Any, rank: int) -> list[Any]:
    """A shard of 16 MiB of a large tensor, and 64 replicas of 16 MiB that every rank holds."""
    shard = _item(library, "sharded", rank * 16 * MIB, 16 * MIB, RANKS * 16 * MIB)
    return [shard, *(_item(library, f"replica{n}", 0, 16 * MIB, 16 * MIB) for n in range(REPLICAS))]


def _loads(plans: Any) -> list[int]:
    return [sum(item.tensor_data.chunk.sizes[0] for item in plan.items) // MIB for plan in plans]


def test_c09_ranks_write_the_same_number_of_bytes() -> None:
    """Stock weighs a shard by its whole tensor: some ranks write three times as much as others."""
    plans = [dcp.planner.SavePlan(_items(dcp, rank)) for rank in range(RANKS)]
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({})
    ours, _ = planner.create_global_plan(plans)
    assert set(_loads(ours)) == {32}
    theirs = stock_dedup([stock.planner.SavePlan(_items(stock, rank)) for rank in range(RANKS)])
    assert (min(_loads(theirs)), max(_loads(theirs))) == (16, 48)


def test_c09_threads_write_the_same_number_of_bytes() -> None:
    """Stock gives the shard a thread of its own, and the replicas to the others."""
    requests = [
        WriteRequest(item.index.fqn, item.tensor_data.chunk.sizes[0], lambda: pytest.fail("not asked for"))
        for item in _items(dcp, 0)[:64]
    ]
    buckets = assign_to_threads(requests, 8)
    assert {sum(requests[position].cost_bytes for position in bucket) // MIB for bucket in buckets} == {128}
    theirs = [
        sum(item.tensor_data.chunk.sizes[0] for item in bucket) // MIB
        for bucket in _split_by_size_and_type(8, _items(stock, 0)[:64])
    ]
    assert min(theirs) == 16


def _staged_bytes(stager: Any) -> int:
    buffer = torch.zeros(64 * MIB, dtype=torch.uint8)
    staged = stager.stage({"view": buffer[100:110]})["view"]
    assert torch.equal(staged, buffer[100:110])
    return int(staged.untyped_storage().nbytes())


def test_c03_only_the_part_that_is_used_is_staged() -> None:
    """Stock stages the whole storage behind a view of ten elements."""
    assert _staged_bytes(dcp.staging.BlockingAsyncStager()) == 10
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    assert _staged_bytes(DefaultStager(options)) == 64 * MIB


@pytest.mark.parametrize("world", [2])
def test_c09_values_as_columns_are_weighed_alike(world: int) -> None:
    """The same through the columns that the default planner makes of tensors."""
    state = {f"t{n}": torch.zeros(n + 1, dtype=torch.uint8) for n in range(100)}
    plans = [dcp.planner.SavePlan(local_values(state).items) for _ in range(world)]
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(state)
    ours, _ = planner.create_global_plan(plans)
    loads = [sum(item.chunk_bytes() for item in plan.items) for plan in ours]
    assert sum(loads) == 5050
    assert max(loads) - min(loads) <= 2

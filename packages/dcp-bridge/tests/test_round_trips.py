"""Stock's storages and planners in our calls, ours in stock's: what is saved one way loads in every way."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import _fsspec_filesystem as stock_fsspec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_core
from dcp_bridge import from_stock, to_stock
from dcp_core import DefaultLoadPlanner, DefaultSavePlanner
from dcp_core.testing.sharding import distribute
from dcp_fs import FileSystemReader, FileSystemWriter

FULL = torch.arange(30, dtype=torch.float32).reshape(6, 5)


def _state(value: float) -> dict[str, Any]:
    weight = FULL * value
    if dist.is_initialized() and dist.get_world_size() > 1:
        weight = distribute(weight, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    tied = torch.full((4,), value)
    return {
        "model": {"weight": weight, "bias": torch.full((3,), value), "tied": tied, "other": tied},
        "step": 7 if value else 0,
        "names": ["a", "b"] if value else [],
    }


def _same(state: dict[str, Any]) -> bool:
    wanted = _state(1.0)
    return (state["step"], state["names"]) == (7, ["a", "b"]) and all(
        torch.equal(
            *(value.to_local() if isinstance(value, DTensor) else value for value in (state["model"][key], right))
        )
        for key, right in wanted["model"].items()
    )


SAVES = {
    "ours": lambda place: dcp_core.save(_state(1.0), storage_writer=FileSystemWriter(place)),
    "ours, stock's writer": lambda place: dcp_core.save(_state(1.0), storage_writer=stock.FileSystemWriter(place)),
    "ours, stock's id": lambda place: dcp_core.save(
        _state(1.0), storage_writer=stock.FileSystemWriter("/nowhere"), checkpoint_id=place
    ),
    "ours, stock's threads": lambda place: dcp_core.save(
        _state(1.0), storage_writer=stock.FileSystemWriter(place, thread_count=2)
    ),
    "ours, stock's fsspec writer": lambda place: dcp_core.save(
        _state(1.0), storage_writer=stock_fsspec.FsspecWriter(f"file://{place}")
    ),
    "ours, stock's planner": lambda place: dcp_core.save(
        _state(1.0), checkpoint_id=place, planner=stock.DefaultSavePlanner()
    ),
    "ours, stock's writer and planner": lambda place: dcp_core.save(
        _state(1.0), storage_writer=stock.FileSystemWriter(place), planner=stock.DefaultSavePlanner()
    ),
    "stock's, our writer": lambda place: stock.save(_state(1.0), storage_writer=to_stock(FileSystemWriter(place))),
    "stock's, our planner": lambda place: stock.save(
        _state(1.0), checkpoint_id=place, planner=to_stock(DefaultSavePlanner())
    ),
    "stock's, our writer and planner": lambda place: stock.save(
        _state(1.0), storage_writer=to_stock(FileSystemWriter(place)), planner=to_stock(DefaultSavePlanner())
    ),
}
LOADS = {
    "ours": lambda state, place: dcp_core.load(state, storage_reader=FileSystemReader(place)),
    "ours, stock's reader": lambda state, place: dcp_core.load(state, storage_reader=stock.FileSystemReader(place)),
    "ours, stock's fsspec reader": lambda state, place: dcp_core.load(
        state, storage_reader=stock_fsspec.FsspecReader(f"file://{place}")
    ),
    "ours, stock's planner": lambda state, place: dcp_core.load(
        state, checkpoint_id=place, planner=stock.DefaultLoadPlanner()
    ),
    "ours, stock's reader and planner": lambda state, place: dcp_core.load(
        state, storage_reader=stock.FileSystemReader(place), planner=stock.DefaultLoadPlanner()
    ),
    "stock's": lambda state, place: stock.load(state, checkpoint_id=place),
    "stock's, our reader": lambda state, place: stock.load(state, storage_reader=to_stock(FileSystemReader(place))),
    "stock's, our planner": lambda state, place: stock.load(
        state, checkpoint_id=place, planner=to_stock(DefaultLoadPlanner())
    ),
    "stock's, our reader and planner": lambda state, place: stock.load(
        state, storage_reader=to_stock(FileSystemReader(place)), planner=to_stock(DefaultLoadPlanner())
    ),
}


def _round(save: str, place: str) -> dict[str, bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        SAVES[save](place)
        found = {}
        for name, load in LOADS.items():
            state = _state(0.0)
            load(state, place)
            found[name] = _same(state)
    return found


@pytest.mark.interop
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("save", SAVES)
def test_saved_in_any_way_loads_in_every_way(ranks, tmp_path, save, world):
    assert ranks.run(world, _round, save, str(tmp_path / "checkpoint")) == [dict.fromkeys(LOADS, True)] * world


def _resharded(place: str) -> bool:
    state = _state(0.0)
    report = dcp_core.load(state, storage_reader=stock.FileSystemReader(place))
    assert set(report.unverified) == {"model.weight", "model.bias", "model.tied", "model.other", "step", "names"}
    return _same(state)


@pytest.mark.interop
def test_another_number_of_ranks_loads_by_stocks_reader(ranks, tmp_path):
    ranks.run(2, _round, "ours, stock's writer", str(tmp_path))
    assert ranks.run(1, _resharded, str(tmp_path)) == [True]
    assert ranks.run(3, _resharded, str(tmp_path)) == [True] * 3


def _metadata(save: str, place: str) -> tuple[str, set[str], bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = SAVES[save](place)
    return type(found).__module__, set(found.state_dict_metadata), bool(found.storage_data)


@pytest.mark.parametrize("save", SAVES)
def test_the_metadata_is_that_of_the_call(ranks, tmp_path, save):
    keys = {"model.weight", "model.bias", "model.tied", "model.other", "step", "names"}
    module = "dcp_core.records.metadata" if save.startswith("ours") else "torch.distributed.checkpoint.metadata"
    assert ranks.run(1, _metadata, save, str(tmp_path)) == [(module, keys, True)]


def _rank_local(save: Any, loads: list[Any], place: str) -> list[bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(place)
        found = []
        for load in loads:
            state = _state(0.0)
            load(state, place)
            found.append(_same(state))
    return found


@pytest.mark.newest
@pytest.mark.interop
def test_saves_without_collectives(ranks, tmp_path):
    def by_stock(place: str) -> None:
        writer = to_stock(FileSystemWriter(place), save_id="00112233aabbccdd")
        stock.save(_state(1.0), storage_writer=writer, use_collectives=False)

    def by_us(place: str) -> None:
        dcp_core.save(_state(1.0), storage_writer=stock.FileSystemWriter(place), use_collectives=False)

    ways = ["ours", "ours, stock's reader", "stock's, our reader"]
    loads = [LOADS[way] for way in ways]
    assert ranks.run(2, _rank_local, by_stock, loads, str(tmp_path / "stock")) == [[True] * 3] * 2
    # What stock's writer leaves, each rank for itself, has no id that all agree on: only stock's reader takes it.
    assert ranks.run(2, _rank_local, by_us, [LOADS["ours, stock's reader"]], str(tmp_path / "ours")) == [[True]] * 2


@pytest.mark.newest
def test_a_rank_local_save_needs_an_id(tmp_path):
    writer = to_stock(FileSystemWriter(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(dcp_core.DcpError, match="save_id="):
            stock.save({"w": torch.ones(2)}, storage_writer=writer, use_collectives=False, no_dist=True)


def test_from_stock_says_the_same_as_the_automatic_way(tmp_path):
    dcp_core.save(_state(1.0), storage_writer=from_stock(stock.FileSystemWriter(tmp_path)), no_dist=True)
    state = _state(0.0)
    dcp_core.load(state, storage_reader=from_stock(stock.FileSystemReader(tmp_path)), no_dist=True)
    assert _same(state)
    everything = dcp_core.load_keys("model", storage_reader=stock.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(everything["model"]["weight"], FULL)

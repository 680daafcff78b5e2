"""Planners that override methods of the other library's: what they change is in the checkpoint, or comes out."""

from __future__ import annotations

import dataclasses
import io
import pickle
import warnings
import zipfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import planner as stock_plan

import dcp_core
from dcp_bridge import from_stock, to_stock
from dcp_bridge.load_planners import _harmless
from dcp_core import DefaultLoadPlanner, DefaultSavePlanner
from dcp_fs import FileSystemReader, FileSystemWriter


def _halving(base: Any) -> Any:
    """A save planner that changes the plan and the data, and notes what it was asked."""

    class Halving(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[str] = []

        def create_local_plan(self) -> Any:
            self.asked.append("create_local_plan")
            plan = super().create_local_plan()
            items = [
                item
                if item.tensor_data is None
                else dataclasses.replace(
                    item,
                    tensor_data=dataclasses.replace(
                        item.tensor_data,
                        properties=dataclasses.replace(item.tensor_data.properties, dtype=torch.float16),
                    ),
                )
                for item in plan.items
            ]
            self.plan = dataclasses.replace(plan, items=items)
            return self.plan

        def create_global_plan(self, all_plans: Any) -> Any:
            self.asked.append(f"create_global_plan of {len(all_plans)}")
            return super().create_global_plan(all_plans)

        def finish_plan(self, new_plan: Any) -> Any:
            self.asked.append("finish_plan")
            return super().finish_plan(dataclasses.replace(new_plan, planner_data="mine"))

        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            return data if isinstance(data, io.BytesIO) else data.to(torch.float16)

    return Halving()


def _renaming(base: Any) -> Any:
    """A load planner that finds `w` under the name `old.w`, through buffers of its own."""

    class Renaming(base):  # type: ignore[misc]
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner({f"old.{key}": value for key, value in state_dict.items()}, metadata, is_coordinator)
            self.committed: list[str] = []
            self.target = state_dict

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return torch.empty_like(super().resolve_tensor(read_item))

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            super().resolve_tensor(read_item).copy_(tensor)
            self.committed.append(read_item.dest_index.fqn)

        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.target[read_item.dest_index.fqn.removeprefix("old.")] = torch.load(value, weights_only=True)

    return Renaming()


STATE = {"old": {"w": torch.arange(6.0), "step": 7}}


def _quietly(call: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, no_dist=True, **kwargs)


SAVE_PLANNERS = {
    "stock's in ours": (dcp_core.save, lambda: _halving(stock.DefaultSavePlanner), lambda planner: planner),
    "ours in stock's": (stock.save, lambda: _halving(DefaultSavePlanner), to_stock),
}


@pytest.mark.newest
@pytest.mark.parametrize("way", SAVE_PLANNERS)
def test_overridden_methods_of_save_planners(way, tmp_path):
    call, make, passed_as = SAVE_PLANNERS[way]
    planner = make()
    metadata = _quietly(call, STATE, checkpoint_id=str(tmp_path), planner=passed_as(planner))
    assert planner.asked == ["create_local_plan", "create_global_plan of 1", "finish_plan"]
    assert metadata.state_dict_metadata["old.w"].properties.dtype is torch.float16
    assert metadata.planner_data["old.w"] == ("old", "w")
    for load in (dcp_core.load, stock.load):
        state = {"old": {"w": torch.zeros(6, dtype=torch.float16), "step": 0}}
        _quietly(load, state, checkpoint_id=str(tmp_path))
        assert torch.equal(state["old"]["w"], STATE["old"]["w"].half())
        assert state["old"]["step"] == 7


LOAD_PLANNERS = {
    "stock's in ours": (dcp_core.load, lambda: _renaming(stock.DefaultLoadPlanner), lambda planner: planner),
    "ours in stock's": (stock.load, lambda: _renaming(DefaultLoadPlanner), to_stock),
}


@pytest.mark.newest
@pytest.mark.parametrize("saved_by", [dcp_core.save, stock.save], ids=["our file", "stock's file"])
@pytest.mark.parametrize("way", LOAD_PLANNERS)
def test_overridden_methods_of_load_planners(way, saved_by, tmp_path):
    _quietly(saved_by, STATE, checkpoint_id=str(tmp_path))
    call, make, passed_as = LOAD_PLANNERS[way]
    planner, state = make(), {"w": torch.zeros(6), "step": 0}
    _quietly(call, state, checkpoint_id=str(tmp_path), planner=passed_as(planner))
    assert planner.committed == ["old.w"]
    assert torch.equal(state["w"], STATE["old"]["w"])
    assert planner.target["step"] == 7


class _Marked:
    """Found in a checkpoint; unpickling it calls it."""

    made: int = 0

    def __init__(self) -> None:
        type(self).made += 1


class _Calls:
    def __reduce__(self) -> Any:
        return _Marked, ()


def _stock_load(place: str, state: Any, **options: Any) -> None:
    _quietly(stock.load, state, storage_reader=to_stock(FileSystemReader(place), **options))


WAYS_IN = {
    "stock's planner in our load": lambda place, state, **options: dcp_core.load(
        state, checkpoint_id=place, planner=from_stock(stock.DefaultLoadPlanner(), **options), no_dist=True
    ),
    "our reader in stock's load": _stock_load,
}


@pytest.mark.newest
@pytest.mark.parametrize("way", WAYS_IN)
def test_no_object_is_unpickled_that_would_run_code(way, tmp_path):
    _quietly(stock.save, {"o": _Calls()}, checkpoint_id=str(tmp_path))
    before = _Marked.made
    with pytest.raises(BaseException, match=r"'o' names .*_Marked.*trust_objects=True") as caught:
        WAYS_IN[way](str(tmp_path), {"o": None})
    assert "UnsafeCheckpointError" in f"{type(caught.value)}{caught.value}"
    assert _Marked.made == before
    WAYS_IN[way](str(tmp_path), {"o": None}, trust_objects=True)
    assert _Marked.made == before + 1


def test_an_object_in_another_form_is_refused(tmp_path):
    planner = from_stock(stock.DefaultLoadPlanner())
    index = dcp_core.MetadataIndex("o")
    none = torch.Size()
    item = dcp_core.ReadItem(dcp_core.LoadItemType.BYTE_IO, index, none, index, none, none)
    with pytest.raises(dcp_core.UnsafeCheckpointError, match=r"'o' is not in torch\.save's form"):
        planner.load_bytes(item, io.BytesIO(b"\x80\x04."))


def test_an_untouched_plan_keeps_its_columns(tmp_path):
    """A stock writer that only adds its storage data costs no items, and the plan still travels as columns."""
    from dcp_core.tables.plan_columns import columns_of

    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(3), "step": 1}, None, True)
    plan = planner.create_local_plan()
    writer = from_stock(stock.FileSystemWriter(tmp_path))
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    (prepared,) = writer.prepare_global_plan([writer.prepare_local_plan(plan)])
    assert prepared.items is plan.items
    assert columns_of(prepared.items) is not None
    assert prepared.splittable
    seen = to_stock(_Seeing(tmp_path)).prepare_local_plan(_plan_of(prepared))
    assert [type(item) for item in seen.items] == [stock_plan.WriteItem] * 2


class _Seeing(FileSystemWriter):
    def prepare_local_plan(self, plan: Any) -> Any:
        assert [type(item) for item in plan.items] == [dcp_core.WriteItem] * 2
        return super().prepare_local_plan(plan)


def _plan_of(plan: dcp_core.SavePlan) -> stock_plan.SavePlan:
    from dcp_bridge.stock_records import stock_save_plan

    return stock_save_plan(plan)


def test_bytes_that_two_readers_read_otherwise_are_not_passed_on(tmp_path):
    """An archive before another one: who begins at the front finds other contents than who begins at the end."""
    marker = tmp_path / "it-ran"
    front = io.BytesIO()
    with zipfile.ZipFile(front, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps("harmless", 2))
    back = io.BytesIO()
    torch.save(_Runs(str(marker)), back)
    given = _harmless("o", front.getvalue() + back.getvalue())
    assert torch.load(given, weights_only=False) == "harmless"
    assert b"it-ran" not in given.getvalue()
    assert not marker.exists()


class _Runs:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (self.marker, "w")

"""What `from_stock` and `to_stock` make of what; and metadata both ways."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

from dcp_bridge import from_stock, to_stock
from dcp_bridge.load_planners import LoadPlannerForStock, StockLoadPlanner
from dcp_bridge.readers import ReaderForStock, StockReader
from dcp_bridge.save_planners import SavePlannerForStock, StockSavePlanner
from dcp_bridge.stock_writer import StockStagingWriter, StockWriter
from dcp_bridge.writer_for_stock import WriterForStock
from dcp_core import DefaultLoadPlanner, DefaultSavePlanner, Metadata, load, save
from dcp_fs import FileSystemReader, FileSystemWriter

OF_STOCK = {
    "writer": (stock.FileSystemWriter, StockWriter),
    "reader": (stock.FileSystemReader, StockReader),
    "save planner": (lambda _: stock.DefaultSavePlanner(), StockSavePlanner),
    "load planner": (lambda _: stock.DefaultLoadPlanner(), StockLoadPlanner),
    "staging writer": (
        lambda folder: stock.FileSystemWriter(folder, cache_staged_state_dict=True),
        StockStagingWriter,
    ),
}
OF_OURS = {
    "writer": (FileSystemWriter, WriterForStock),
    "reader": (FileSystemReader, ReaderForStock),
    "save planner": (lambda _: DefaultSavePlanner(), SavePlannerForStock),
    "load planner": (lambda _: DefaultLoadPlanner(), LoadPlannerForStock),
}


@pytest.mark.parametrize("kind", OF_STOCK)
def test_stocks_become_ours_and_what_they_were(kind, tmp_path):
    make, adapter = OF_STOCK[kind]
    value = make(tmp_path)
    made: Any = from_stock(value)
    assert type(made) is adapter
    assert to_stock(made) is value
    assert from_stock(made) is made
    assert repr(value) in repr(made)
    assert type(pickle.loads(pickle.dumps(made)).wrapped) is type(value)


@pytest.mark.parametrize("kind", OF_OURS)
def test_ours_become_stocks_and_what_they_were(kind, tmp_path):
    make, adapter = OF_OURS[kind]
    value = make(tmp_path)
    made: Any = to_stock(value)
    assert type(made) is adapter
    assert from_stock(made) is value
    assert to_stock(made) is made
    assert type(pickle.loads(pickle.dumps(made)).wrapped) is type(value)


@pytest.mark.parametrize("function", [from_stock, to_stock])
def test_other_things_are_refused(function):
    with pytest.raises(TypeError, match=r"builtins\.dict is not a storage, planner or Metadata"):
        function({})


def test_stored_ids_are_told(tmp_path):
    assert from_stock(stock.FileSystemWriter(tmp_path)).checkpoint_id == tmp_path
    assert to_stock(FileSystemReader(tmp_path)).checkpoint_id == tmp_path
    assert not type(from_stock(stock.FileSystemWriter(tmp_path))).validate_checkpoint_id(tmp_path)


def test_metadata_goes_both_ways(tmp_path):
    state = {
        "model": {"weight": torch.ones(3, 4, dtype=torch.bfloat16)},
        "step": 7,
        "names": ["a", {"b": torch.ones(2)}],
    }
    own = save(state, checkpoint_id=str(tmp_path), no_dist=True)
    theirs = to_stock(own)
    assert type(theirs) is stock.Metadata
    read = stock.FileSystemReader(tmp_path).read_metadata()
    assert theirs.state_dict_metadata == read.state_dict_metadata
    assert theirs.planner_data == read.planner_data
    assert theirs.storage_data == read.storage_data
    back = from_stock(theirs)
    assert type(back) is Metadata
    assert back == FileSystemReader(tmp_path).read_metadata() or back.storage_data == own.storage_data
    assert to_stock(back) == theirs


def test_options_reach_the_adapter(tmp_path):
    with pytest.raises(TypeError, match="no_such"):
        from_stock(stock.FileSystemWriter(tmp_path), no_such=1)  # type: ignore[call-overload]


def test_a_planner_sees_the_attributes_of_the_other(tmp_path):
    planner = stock.DefaultLoadPlanner(flatten_state_dict=False)
    assert from_stock(planner).flatten_state_dict is False  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no_such"):
        from_stock(planner).no_such  # type: ignore[attr-defined]  # noqa: B018
    save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path), no_dist=True)
    state = {"w": torch.zeros(2)}
    load(state, checkpoint_id=str(tmp_path), planner=planner, no_dist=True)
    assert torch.equal(state["w"], torch.ones(2))

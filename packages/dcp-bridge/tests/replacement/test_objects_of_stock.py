"""Objects of stock that were made or derived before a replacement, in calls that are ours during it, on ranks."""

from __future__ import annotations

import copy
import copyreg
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_core
from dcp_bridge import original_stock, replace_stock

pytestmark = [pytest.mark.newest, pytest.mark.filterwarnings("ignore")]


class Writer(stock.FileSystemWriter):
    """A class derived from stock's before any replacement."""


def _save_by_stocks_writers(folder: str) -> list[bool]:
    mesh, same = dist.init_device_mesh("cpu", (dist.get_world_size(),)), []
    with replace_stock():
        for number, (kind, call) in enumerate((kind, call) for kind in WRITERS for call in CALLS):
            place = f"{folder}/{number}"
            state = {"w": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]), "step": 3}
            CALLS[call](state, WRITERS[kind](place))
            loaded = {"w": torch.zeros(4), "step": 0}
            stock.load(loaded, storage_reader=stock.FileSystemReader(place))
            same.append(torch.equal(loaded["w"], torch.arange(4.0)) and loaded["step"] == 3)
    return same


WRITERS = {"stock's": stock.FileSystemWriter, "derived": Writer}
CALLS: dict[str, Any] = {
    "save": lambda state, writer: stock.save(state, storage_writer=writer),
    "thread": lambda state, writer: stock.async_save(state, storage_writer=writer).result(100),
    "process": lambda state, writer: stock.async_save(  # its process cannot import this module
        state,
        storage_writer=original_stock().FileSystemWriter(writer.path),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    ).result(100),
}
# Stays stock's, as this module derives a class; torch 2.6 has none.
AsyncCheckpointerType: Any = getattr(saver, "AsyncCheckpointerType", None)


def test_stocks_writers_made_before_it_save_on_ranks(ranks, tmp_path):
    assert ranks.run(2, _save_by_stocks_writers, str(tmp_path)) == [[True] * 6] * 2


PICKLERS: dict[str, Callable[[Any], bytes]] = {
    "pickle": pickle.dumps,
    "protocol 2": lambda value: pickle.dumps(value, 2),
    "pickle in Python": pickle._dumps,
    "cloudpickle": cloudpickle.dumps,
    "multiprocessing": lambda value: bytes(ForkingPickler.dumps(value)),
}


@pytest.mark.parametrize("kind", PICKLERS)
def test_records_of_stock_pickle_by_stocks_names(kind, tmp_path):
    """The bytes load in any process: stock's records without a replacement, ours in one."""
    stock.save({"w": torch.arange(4.0), "n": {"a": 1}}, checkpoint_id=tmp_path)
    theirs = stock.FileSystemReader(tmp_path).read_metadata()
    with replace_stock():
        data = PICKLERS[kind]({"index": theirs, "places": [*theirs.storage_data]})
        assert type(pickle.loads(data)["index"]) is dcp_core.Metadata
        assert copy.deepcopy(theirs) == copy.copy(theirs) == theirs
        assert type(copy.deepcopy(theirs)) is type(theirs)
        (tmp_path / ".metadata").write_bytes(PICKLERS[kind](theirs))  # as a writer with files of its own does
        loaded = {"w": torch.zeros(4), "n": {"a": 0}}
        dcp_core.load(loaded, checkpoint_id=tmp_path)
        assert torch.equal(loaded["w"], torch.arange(4.0))
    assert b"dcp_" not in data
    assert pickle.loads(data) == {"index": theirs, "places": [*theirs.storage_data]}
    assert type(theirs) not in copyreg.dispatch_table
    stock.load(loaded, checkpoint_id=tmp_path)


def test_a_class_of_stock_itself_is_not_pickled():
    """A known limit: only its instances are."""
    kind = original_stock("metadata").Metadata
    with replace_stock(), pytest.raises(pickle.PicklingError, match="it's not the same object as"):
        pickle.dumps(kind)

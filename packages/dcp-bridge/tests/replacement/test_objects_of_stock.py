"""Objects of stock that were made or derived before a replacement, in calls that are ours during it, on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.tensor import Shard, distribute_tensor

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

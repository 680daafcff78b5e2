"""Asynchronous saves: ours with a writer, planner or stager of stock's; stock's with ours."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_core
from dcp_bridge import to_stock
from dcp_fs import FileSystemWriter

dcp_async = pytest.importorskip("dcp_async", reason="needs dcp-async")


def _same(place: Any) -> bool:
    state = {"w": torch.zeros(5), "step": 0}
    dcp_core.load(state, checkpoint_id=str(place), no_dist=True)
    return torch.equal(state["w"], torch.arange(5.0)) and state["step"] == 3


class StagingWriter(stock.FileSystemWriter):
    """Makes the copy of an asynchronous save itself."""

    staged: int = 0

    def stage(self, state_dict: Any) -> Any:
        type(self).staged += 1
        return super().stage(state_dict)


WAYS = {
    "writer": lambda place: {"storage_writer": stock.FileSystemWriter(place)},
    "staging writer": lambda place: {"storage_writer": StagingWriter(place)},
    "planner": lambda place: {"checkpoint_id": str(place), "planner": stock.DefaultSavePlanner()},
    "stager": lambda place: {"checkpoint_id": str(place), "async_stager": stock.staging.BlockingAsyncStager()},
}


@pytest.mark.newest
@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_our_async_save_with_stocks_objects(kind, tmp_path):
    with dcp_async.AsyncSaver(kind) as saver:
        for way, make in WAYS.items():
            if (way, kind) == ("staging writer", "process"):  # its class lives in this module, not in the worker's
                continue
            state, before = {"w": torch.arange(5.0), "step": 3}, StagingWriter.staged
            future = saver.save(state, no_dist=True, **make(tmp_path / way))
            state["w"].zero_()
            future.result(60)
            assert _same(tmp_path / way), way
            assert StagingWriter.staged - before == (way == "staging writer")


@pytest.mark.newest
def test_stocks_async_save_with_our_writer(tmp_path):
    state = {"w": torch.arange(5.0), "step": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        future: Any = stock.async_save(state, storage_writer=to_stock(FileSystemWriter(tmp_path)), no_dist=True)
        state["w"].zero_()
        future.result(60)
    assert _same(tmp_path)


def test_another_role_is_refused_at_once(tmp_path):
    with dcp_async.AsyncSaver("thread") as saver, pytest.raises(TypeError, match="is a LoadPlanner, and a SavePlanner"):
        saver.save({"w": torch.ones(1)}, checkpoint_id=str(tmp_path), planner=dcp_core.DefaultLoadPlanner())

"""What fails in the other library's objects: told on every rank, and nothing is left half done."""

from __future__ import annotations

import contextlib
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.api import CheckpointException as StockException

import dcp_core
from dcp_bridge import from_stock, to_stock
from dcp_fs import FileSystemReader, FileSystemWriter
from integration_tests.kits.damage import flip

STATE = {"w": torch.ones(4), "v": torch.ones(5), "step": 1}


class LosingWriter(stock.FileSystemWriter):
    """As stock's when a helper thread fails: it returns without saying so."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        results = super().write_data(plan, planner).value()
        future: Any = torch.futures.Future()
        future.set_result(results[:-1])
        return future


def test_items_that_were_not_written_fail_the_save(tmp_path):
    with pytest.raises(dcp_core.DcpError, match="LosingWriter did not report 1 of 3 items as written: '"):
        dcp_core.save(STATE, storage_writer=LosingWriter(tmp_path), no_dist=True)
    assert not (tmp_path / ".metadata").exists()
    silent: Any = from_stock(LosingWriter(tmp_path), check_results=False)
    dcp_core.save(STATE, storage_writer=silent, no_dist=True)
    assert (tmp_path / ".metadata").exists()


class FailingWriter(stock.FileSystemWriter):
    def __init__(self, path: str, error: BaseException, aborted: list[str]) -> None:
        super().__init__(path)
        self.error, self.aborted = error, aborted

    def write_data(self, plan: Any, planner: Any) -> Any:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
            return super().write_data(plan, planner)
        raise self.error

    def abort(self, error: BaseException) -> None:
        self.aborted.append(str(error))


def _fail(place: str, error: BaseException) -> tuple[str, list[str]]:
    aborted: list[str] = []
    try:
        dcp_core.save(STATE, storage_writer=FailingWriter(place, error, aborted), timeout_seconds=60)
    except dcp_core.CheckpointException as found:
        return str(found), [text.splitlines()[0] for text in aborted]
    raise AssertionError("the save did not fail")


def test_an_error_of_one_rank_reaches_all(ranks, tmp_path):
    for told, aborted in ranks.run(2, _fail, str(tmp_path), OSError("disk is full")):
        assert "failed on rank 1" in told
        assert "disk is full" in told
        assert len(aborted) == 1, "a writer that has `abort` hears of it"
    assert not (tmp_path / ".metadata").exists()


def test_stocks_exception_which_is_no_exception_becomes_ours(ranks, tmp_path):
    error = StockException("write", {1: (OSError("inner"), None)})  # type: ignore[dict-item]
    for told, _ in ranks.run(2, _fail, str(tmp_path), error):
        assert "write_data of torch.distributed.checkpoint failed" in told


def test_a_missing_checkpoint_is_said_to_be_missing(tmp_path):
    with pytest.raises(dcp_core.CheckpointNotFoundError, match=r"FileSystemReader finds no checkpoint at .*nothing"):
        dcp_core.load(dict(STATE), storage_reader=stock.FileSystemReader(tmp_path / "nothing"), no_dist=True)


ROLES = {
    "a reader for a writer": lambda place: dcp_core.save(
        STATE, storage_writer=stock.FileSystemReader(place), no_dist=True
    ),
    "a writer for a reader": lambda place: dcp_core.load(
        dict(STATE), storage_reader=from_stock(stock.FileSystemWriter(place)), no_dist=True
    ),
    "a load planner for a save": lambda place: dcp_core.save(
        STATE, checkpoint_id=place, planner=from_stock(stock.DefaultLoadPlanner()), no_dist=True
    ),
}


@pytest.mark.parametrize("role", [role for role in ROLES if role != "a reader for a writer"])
def test_another_role_is_refused(role, tmp_path):
    with pytest.raises(TypeError, match=r"is a \w+, and a \w+ is needed here"):
        ROLES[role](str(tmp_path))


def _failing_stock_save(place: str) -> tuple[list[str], bool]:
    """Rank 1's planner fails in stock's save; afterwards the same id is saved again by another writer object."""

    class Planner(stock.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if torch.distributed.get_rank() == 1:
                raise OSError("rank 1 cannot")
            return super().resolve_data(write_item)

    state = {f"w{number}": torch.ones(3) for number in range(8)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = to_stock(FileSystemWriter(place))
        with contextlib.suppress(StockException):
            stock.save(state, storage_writer=writer, planner=Planner())
            raise AssertionError("the save did not fail")
        del writer
        gc.collect()  # a traceback holds it
        torch.distributed.barrier()
        left = sorted(path.name for path in Path(place).iterdir())
        torch.distributed.barrier()
        stock.save(state, storage_writer=to_stock(FileSystemWriter(place)))
        loaded = {name: torch.zeros(3) for name in state}
        dcp_core.load(loaded, storage_reader=FileSystemReader(place))
    return left, all(torch.equal(value, torch.ones(3)) for value in loaded.values())


@pytest.mark.newest
def test_a_failed_save_of_stock_is_cleared_away_and_can_be_repeated(ranks, tmp_path):
    for left, same in ranks.run(2, _failing_stock_save, str(tmp_path)):
        assert not [name for name in left if name.endswith("metadata")]
        assert not [name for name in left if name.startswith("__0_")], "the coordinator's own are gone at once"
        assert same


@pytest.mark.newest
def test_a_reused_writer_begins_anew_after_a_failure(tmp_path):
    class Planner(stock.DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            raise OSError("no plan")

    writer = to_stock(FileSystemWriter(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(StockException, match="no plan"):
            stock.save(STATE, storage_writer=writer, planner=Planner(), no_dist=True)
        stock.save(STATE, storage_writer=writer, no_dist=True)
        stock.save(STATE, storage_writer=writer, checkpoint_id=tmp_path / "two", no_dist=True)
    for place in (tmp_path, tmp_path / "two"):
        state = {"w": torch.zeros(4), "v": torch.zeros(5), "step": 0}
        dcp_core.load(state, checkpoint_id=str(place), no_dist=True)
        assert torch.equal(state["w"], torch.ones(4))


@pytest.mark.newest
def test_a_flipped_bit_is_found_by_our_reader_in_stocks_load(tmp_path):
    weight = torch.full((64,), 3.25)
    dcp_core.save({"w": weight}, checkpoint_id=str(tmp_path), no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    flip(file, file.read_bytes().index(weight.numpy().tobytes()) + 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(StockException, match="differ from what was written"):
            stock.load({"w": torch.zeros(64)}, storage_reader=to_stock(FileSystemReader(tmp_path)), no_dist=True)

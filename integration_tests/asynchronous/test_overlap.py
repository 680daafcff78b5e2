"""Saves that overlap, on real ranks: each policy, the same fate on all ranks, every future resolves."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_async import AsyncSaver, SaveSkippedError
from dcp_async.queue.jobs import SaveFuture
from dcp_async.saver import shared_saver
from dcp_core import load
from dcp_ranks.testing.ranks import RankPool
from integration_tests.kits.memory import MemoryWriter

KINDS = ["thread", "process"]
SAVES = 4


class GatedWriter(MemoryWriter):
    """Says when it writes, and goes on when it is allowed to, on rank 1 a little later."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.entered, self.open = threading.Event(), threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.entered.set()
        assert self.open.wait(120)
        time.sleep(0.1 * dist.get_rank())
        return super().write_data(plan, planner)


def _state(number: int) -> dict[str, Any]:
    rank = dist.get_rank()
    return {f"own.{rank}": torch.full((1000,), float(number)), "both": torch.full((10,), float(number)), "n": number}


def _fates(kind: str, overlap: Any, folder: str) -> list[str]:
    fates = []
    saver = shared_saver(kind)  # its worker is kept from test to test
    saver.warm_up()
    futures = [
        saver.save(_state(number), checkpoint_id=f"{folder}/{number}", overlap=overlap) for number in range(SAVES)
    ]
    for future in futures:
        assert isinstance(future, SaveFuture)
        error = future.exception(timeout=250)
        if error is not None and not isinstance(error, SaveSkippedError):
            raise error
        fates.append("saved" if error is None else type(error).__name__)
    for number, fate in enumerate(fates):
        if fate == "saved":
            found = _state(-1)
            load(found, checkpoint_id=f"{folder}/{number}")
            assert found["n"] == number
            assert all(bool((value == number).all()) for key, value in found.items() if key != "n")
    return fates


@pytest.mark.parametrize("overlap", ["wait", "skip", "latest"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_four_overlapping_saves(ranks: RankPool, tmp_path: Path, kind: str, overlap: str, world_size: int) -> None:
    fates = ranks.run(world_size, _fates, kind, overlap, str(tmp_path), timeout_seconds=280)
    assert all(each == fates[0] for each in fates), fates
    if overlap == "wait":
        assert fates[0] == ["saved"] * SAVES
    if overlap == "skip":
        assert fates[0][0] == "saved"
    if overlap == "latest":  # the first may not have begun when the second comes
        assert fates[0][-1] == "saved"


def _slow_fates(overlap: Any) -> list[str]:
    saver = AsyncSaver("thread", overlap=overlap)
    first = GatedWriter("gated")
    futures = [saver.save(_state(0), storage_writer=first)]
    assert first.entered.wait(120)
    dist.barrier()  # it runs on all ranks
    if overlap == "wait":
        first.open.set()  # the next one would wait for ever
    futures += [saver.save(_state(number), storage_writer=MemoryWriter(f"{number}")) for number in range(1, SAVES)]
    first.open.set()
    errors = [future.exception(timeout=250) for future in futures if isinstance(future, SaveFuture)]
    saver.close()
    return ["saved" if error is None else type(error).__name__ for error in errors]


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        ("wait", ["saved"] * 4),
        ("skip", ["saved"] + ["SaveSkippedError"] * 3),
        ("latest", ["saved", "SaveSkippedError", "SaveSkippedError", "saved"]),
    ],
)
def test_fates_while_one_save_runs(ranks: RankPool, overlap: str, expected: list[str]) -> None:
    assert ranks.run(2, _slow_fates, overlap, timeout_seconds=280) == [expected] * 2


def _train_beside(kind: str, folder: str) -> float:
    """Saves while the trainer uses its own group for collectives."""
    value = torch.ones(1)
    future = shared_saver(kind).save(_state(1), checkpoint_id=folder)
    assert isinstance(future, SaveFuture)
    stop = torch.zeros(1)
    while not stop.item():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        stop.fill_(float(future.done()))
        dist.all_reduce(stop, op=dist.ReduceOp.MIN)
    future.result()
    return value.item()


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainers_own_group_is_left_alone(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks.run(2, _train_beside, kind, str(tmp_path), timeout_seconds=280) == [1.0, 1.0]


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'skip'"):
        AsyncSaver("thread", overlap="sometimes")  # type: ignore[arg-type]

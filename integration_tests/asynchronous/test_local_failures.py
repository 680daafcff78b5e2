"""What fails on one rank alone as an asynchronous save begins: that save fails on all ranks, and the next is whole."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_async import AsyncSaver
from dcp_async.queue import save_agreement
from dcp_async.queue.save_queue import SaveQueue
from dcp_async.savers.backend import ThreadBackend
from dcp_async.staging import copy_state
from dcp_ranks.testing.ranks import RankPool


def refuse(code: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


FAILURES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "no connection": (save_agreement, "borrow_store", refuse(errno.EMFILE)),
    "no monitor": (save_agreement, "shared_peers", refuse(errno.EMFILE)),
    "no backend": (ThreadBackend, "before_save", refuse(errno.ENOMEM)),
    "no turn": (SaveQueue, "wait_turn", refuse(errno.ENOMEM)),
    "no tensors over the copy": (copy_state, "arena_view", refuse(errno.ENOMEM)),
    "no coordinator": (save_agreement.GroupLink, "coordinator", refuse(errno.EMFILE)),
}


def saves(folder: str, failure: str) -> tuple[list[str], float, list[int]]:
    """Save twice over a new group, the first time with a failure on rank 1; returns the ends and the trainer's sum."""
    group, rank, ends = dist.new_group(), dist.get_rank(), []
    place, name, call = FAILURES[failure]
    options = dcp.SaverOptions(timeout_seconds=600)
    began = time.monotonic()
    with AsyncSaver("thread", options=options) as saver:
        for number in range(2):
            fails = number == 0 and rank == 1
            try:
                with mock.patch.object(place, name, call if fails else getattr(place, name)):
                    future = saver.save(
                        {"w": torch.full((4,), float(number))}, checkpoint_id=f"{folder}/{number}", process_group=group
                    )
                    future.result()  # type: ignore[union-attr]
                ends.append("saved")
            except Exception as error:  # noqa: BLE001 - any
                ends.append(f"{type(error).__name__}: {error}")
            numbers = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(numbers, torch.tensor([float(rank)]))
            assert [int(each) for each in numbers] == [*range(dist.get_world_size())]
    return ends, time.monotonic() - began, [int(each) for each in numbers]


@pytest.mark.parametrize("failure", FAILURES)
def test_what_fails_on_one_rank_before_a_save(ranks: RankPool, tmp_path: Path, failure: str) -> None:
    for rank, (ends, seconds, _) in enumerate(ranks.run(3, saves, str(tmp_path), failure)):
        assert ends[1] == "saved"
        assert seconds < 250  # of a deadline of 600
        if rank == 1:
            assert ends[0].startswith("OSError")
        else:
            assert ends[0].startswith("CheckpointException")
            assert "failed on rank 1" in ends[0]
    state = {"w": torch.zeros(4)}
    dcp.load(state, checkpoint_id=tmp_path / "1", no_dist=True)
    assert state["w"].tolist() == [1.0] * 4
    assert not (tmp_path / "0" / ".metadata").exists()

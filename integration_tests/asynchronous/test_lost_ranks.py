"""A rank is killed before its saver has met those of the other ranks: they notice it long before the timeout."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from dcp_async import AsyncSaver, SaverOptions
from dcp_core import load, save
from dcp_ranks import PeerOptions
from dcp_ranks.testing.ranks import RankPool
from integration_tests.kits.coordinators import pretended_host

Kind = Literal["thread", "process"]
VICTIM = 2
NEVER = 1800.0


class Fatal:
    """Object of a state dict that kills its rank while the copy is made."""

    def state_dict(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def _lose_a_rank(folder: str, kind: Kind, *, apart: bool, earlier: bool, copying: bool, relays: bool) -> str:
    """Save with a new saver while a rank is killed; returns what the others are told."""
    rank = dist.get_rank()
    options = PeerOptions(leaders_above=1) if relays else PeerOptions()
    with pretended_host(rank // 2) if apart else nullcontext():
        if earlier:
            save({"w": torch.ones(3)}, checkpoint_id=folder, peers=options)
            load({"w": torch.zeros(3)}, checkpoint_id=folder, peers=options)
        dist.barrier()
        if rank == VICTIM and not copying:
            os.kill(os.getpid(), signal.SIGKILL)
        saver = AsyncSaver(kind, options=SaverOptions(timeout_seconds=NEVER, peers=options))
        state = {"w": torch.ones(3), "fatal": Fatal()} if rank == VICTIM else {"w": torch.ones(3)}
        error = saver.save(state, checkpoint_id=f"{folder}-2").exception(timeout=250)
        saver.end()
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize(
    ("apart", "earlier", "copying", "relays"),
    [
        pytest.param(False, False, True, False, id="first operation"),
        pytest.param(True, True, True, False, id="hosts"),
        pytest.param(True, True, False, False, id="hosts, before the save"),
        pytest.param(True, True, True, True, id="hosts with leaders"),
    ],
)
def test_a_rank_is_lost_before_the_savers_have_met(
    ranks: RankPool, tmp_path: Path, kind: Kind, apart: bool, earlier: bool, copying: bool, relays: bool
) -> None:
    ranks.run(1, dist.is_initialized, backend=None)  # a new group
    lose = partial(_lose_a_rank, apart=apart, earlier=earlier, copying=copying, relays=relays)
    found = ranks.run(4, lose, str(tmp_path / "saved"), kind, expect_death=[VICTIM], timeout_seconds=200)
    for told in (found[rank] for rank in range(4) if rank != VICTIM):
        assert told.startswith("PeerLostError")
        assert f"rank {VICTIM} is gone" in told


def _side_by_side(folder: str, count: int) -> list[float]:
    """Saves of two savers and of the trainer at once, whose messages go over the same connections."""
    options = PeerOptions(leaders_above=1)
    found = []
    with pretended_host(dist.get_rank() // 2):
        savers = [AsyncSaver("thread", options=SaverOptions(timeout_seconds=60, peers=options)) for _ in range(2)]
        for number in range(count):
            values = [torch.full((3,), float(10 * number + which)) for which in range(3)]
            futures = [
                saver.save({"w": value}, checkpoint_id=f"{folder}-{which}")
                for which, (saver, value) in enumerate(zip(savers, values, strict=False))
            ]
            save({"w": values[2]}, checkpoint_id=f"{folder}-2", peers=options)
            for future in futures:
                future.result(timeout=250)
            for which in range(3):
                state = {"w": torch.zeros(3)}
                load(state, checkpoint_id=f"{folder}-{which}", peers=options)
                found.append(float(state["w"][1]))
        for saver in savers:
            saver.close()
    return found


def test_savers_and_saves_share_their_connections(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, dist.is_initialized, backend=None)
    found = ranks.run(4, _side_by_side, str(tmp_path / "saved"), 5, timeout_seconds=200)
    assert found == [[float(10 * number + which) for number in range(5) for which in range(3)]] * 4

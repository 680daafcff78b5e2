"""Reasons to save that one rank has: all ranks act on them in the same step, and steps without one exchange nothing."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import dcp_manager.together
from dcp_manager import CheckpointManager, EverySeconds, EverySteps, OnRequest, OnSignal, SavePolicy
from dcp_manager.save_policies import Moment
from integration_tests.manager.checkpoints import state

BOTH = EverySteps(1000) | OnSignal({signal.SIGUSR1}, stop=set()) | OnRequest()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "dcp-alert"]


def steps_at_random(root: str, seed: int, training: str) -> tuple[list[int], list[str]]:
    """Make 60 steps that take random times, with random reasons on this rank."""
    chance = random.Random(seed * 100 + dist.get_rank())
    saved = []
    with CheckpointManager(root, save_policy=BOTH) as manager:
        for step in range(1, 61):
            time.sleep(chance.random() * 0.02)
            if training == "coupled":
                dist.barrier()
            if chance.random() < 0.05:
                manager.request_save()
            if chance.random() < 0.05:
                os.kill(os.getpid(), signal.SIGUSR1)
            if manager.maybe_save(step, state(step)):
                saved.append(step)
    return saved, threads()


@pytest.mark.parametrize("training", ["coupled", "uncoupled"])
@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_save_the_same_steps(ranks: Any, tmp_path: Path, world: int, training: str) -> None:
    for seed in range(3):
        found = ranks.run(world, steps_at_random, str(tmp_path / str(seed)), seed, training)
        assert found == [found[0]] * world
        assert found[0][1] == []


def count_exchanges(root: str, policy: SavePolicy) -> int:
    """Return how many of 20 steps without a reason are exchanges, after the first."""
    made: list[int] = []
    with CheckpointManager(root, save_policy=policy) as manager, pytest.MonkeyPatch.context() as patch:
        manager.maybe_save(1, state(1))
        real = dcp_manager.together.make_coordinator
        patch.setattr(dcp_manager.together, "make_coordinator", lambda *a, **k: (made.append(1), real(*a, **k))[1])
        for step in range(2, 22):
            assert not manager.maybe_save(step, state(step))
        patch.undo()
    return len(made)


class Odd(SavePolicy):
    """A program's own policy, which may depend on anything."""

    def due(self, moment: Moment) -> bool:
        return moment.step % 2 == 1 and moment.requested


class OddRequest(OnRequest):
    """Overrides `due`: what it inherits says nothing about it."""

    def due(self, moment: Moment) -> bool:
        return moment.step % 2 == 1 and moment.requested


@pytest.mark.parametrize(
    ("policy", "exchanges"),
    [
        (EverySteps(1000), 0),
        (OnSignal(), 0),
        (EverySteps(1000) | OnSignal() | OnRequest() | EverySeconds(1000), 0),
        (Odd(), 20),
        (OddRequest(), 20),
        (EverySteps(1000) | OnSignal() | Odd(), 20),
    ],
    ids=["steps", "signal", "all", "own", "subclass", "own among others"],
)
def test_steps_without_a_reason_exchange_nothing(
    ranks: Any, tmp_path: Path, policy: SavePolicy, exchanges: int
) -> None:
    assert ranks.run(2, count_exchanges, str(tmp_path), policy) == [exchanges] * 2


def one_reason(root: str, kind: str, last: int) -> list[int]:
    """Return the steps that are saved if the last rank has a reason in step 3 of `last`; the ranks keep step."""
    policy = EverySteps(1000) | OnSignal() | OnRequest() | EverySeconds(1.0 if kind == "time" else 1000.0)
    saved, now = [], [0.0]
    clock = mock.patch("dcp_manager.manager.time", SimpleNamespace(monotonic=lambda: now[0]))
    with clock, CheckpointManager(root, save_policy=policy) as manager:
        for step in range(1, last + 1):
            dist.barrier()
            if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
                if kind == "signal":
                    os.kill(os.getpid(), signal.SIGTERM)
                if kind == "request":
                    manager.request_save()
            if step == 3 and kind == "time":
                now[0] += 1.1
            if manager.maybe_save(step, state(step)):
                saved.append(step)
            if manager.preempted or (kind == "time" and saved):
                break
    return saved


@pytest.mark.parametrize("kind", ["signal", "request", "time"])
def test_the_save_is_one_step_late_at_most(ranks: Any, tmp_path: Path, kind: str) -> None:
    found = ranks.run(4, one_reason, str(tmp_path), kind, 6)
    assert found in ([[3]] * 4, [[4]] * 4)


def test_a_reason_in_the_last_step_holds_nobody_up(ranks: Any, tmp_path: Path) -> None:
    found = ranks.run(4, one_reason, str(tmp_path), "signal", 3)
    assert found in ([[3]] * 4, [[]] * 4)  # others may have left the loop


def drop(root: str) -> list[str]:
    manager = CheckpointManager(root, save_policy=OnRequest())
    manager.maybe_save(1, state(1))
    assert threads() == ["dcp-alert"]
    del manager
    gc.collect()
    end = time.monotonic() + 60
    while threads() and time.monotonic() < end:
        time.sleep(0.05)
    return threads()


def test_a_manager_that_is_dropped_leaves_no_thread(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, drop, str(tmp_path)) == [[], []]

"""State that a worker keeps from save to save."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from dcp_async.options import WorkerOptions
from dcp_async.queue.save_agreement import Ticket
from dcp_async.savers import worker_save as worker_saves
from dcp_async.savers.worker_messages import Failed, ForgetArena, Hello, NewStructure, Save
from dcp_async.staging.arenas import ArenaPool
from dcp_async.staging.copy_state import Copier, Staged, Stager
from integration_tests.kits.memory import MemoryWriter


class LostMeeting:
    """Meeting of a group whose store is gone."""

    class seat:  # noqa: N801
        rank, job_size = 0, 1

    def __init__(self) -> None:
        self.withdrawn: list[tuple[int, str]] = []

    def coordinator(self, ticket: Any) -> Any:
        raise ConnectionError("nobody is there")

    def withdraw(self, ticket: Ticket, error: BaseException) -> None:
        self.withdrawn.append((ticket.sequence, str(error)))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Messages of a worker in this process, which does not change logging and warnings."""
    monkeypatch.setattr(worker_saves, "_forward", lambda *_: None)
    return []


def _staged() -> Staged:
    return Stager(ArenaPool(shared=False, pinned=False), Copier(1)).stage({"w": torch.ones(3), "step": 1})


def _save(staged: Staged, **changed: Any) -> Save:
    means = pickle.dumps((MemoryWriter("a"), None, None))
    return Save(1, staged.structure.identifier, 0, "lost", Ticket(1), "place", True, **{"means": means, **changed})


def test_what_came_with_a_save_that_failed_early_is_kept(told: list[Any]) -> None:
    threads = torch.get_num_threads()
    saves = worker_saves.WorkerSaves(told.append, Hello((), WorkerOptions(torch_threads=threads), 30))
    staged = _staged()
    saves.handle(NewStructure(staged.structure))
    saves._arenas[0] = staged.arena.view()
    meeting: Any = LostMeeting()
    saves._meetings["lost"] = meeting
    saves.handle(_save(staged, objects={0: 7}))
    assert isinstance(told[0], Failed)
    assert "nobody is there" in told[0].failure.text
    assert meeting.withdrawn == [(1, "nobody is there")]  # the other ranks do not wait for this save
    state, writer, _ = saves._what(_save(staged, means=None))
    assert (state["step"], writer.checkpoint_id) == (7, "a")


def test_arenas_that_are_dropped_are_not_kept(told: list[Any]) -> None:
    saves = worker_saves.WorkerSaves(told.append, Hello((), WorkerOptions(torch_threads=torch.get_num_threads()), 30))
    staged = _staged()
    saves.handle(NewStructure(staged.structure))
    saves._arenas[0] = staged.arena.view()
    saves._learn(_save(staged, objects={0: 7}))
    saves._what(_save(staged))
    assert staged.arena.in_use()
    saves.handle(ForgetArena(0))
    assert not staged.arena.in_use()

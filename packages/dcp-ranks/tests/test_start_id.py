"""The id of a start of the job: the same on all ranks, and another for ranks that are started again at one store."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dcp_ranks import CoordinatorTimeoutError, make_coordinator
from dcp_ranks.phases import store_phase
from dcp_ranks.store_connections import StartAgreement

WORLD_SIZE = 4


class Killed(BaseException):
    """Ends a rank between two requests to the store."""


class Mortal:
    """A store whose client ends at its nth request."""

    def __init__(self, store, requests):
        self._store = store
        self._left = requests

    def __getattr__(self, name):
        def request(*arguments):
            if self._left == 0:
                raise Killed
            self._left -= 1
            time.sleep(random.random() / 2000)  # in another order each time
            return getattr(self._store, name)(*arguments)

        return request


def start(store, world_size, requests):
    """What each rank of a start reaches: an id, or None for one that was killed or waited for one that was."""

    def work(rank):
        try:
            return StartAgreement(rank, world_size).reach(
                Mortal(store, requests.get(rank, -1)), 20 if not requests else 0.2
            )
        except (Killed, CoordinatorTimeoutError):
            return None

    with ThreadPoolExecutor(world_size) as pool:
        return [*pool.map(work, range(world_size))]


@pytest.mark.parametrize("seed", range(10))
def test_ranks_of_a_start_agree_whatever_the_starts_before_have_left(seed):
    chance = random.Random(seed)
    store, seen = dist.HashStore(), set()
    for _ in range(4):
        world_size = chance.choice([2, 3, WORLD_SIZE])
        killed = {rank: chance.randrange(12) for rank in range(world_size) if chance.random() < 0.4}
        ids = {found for found in start(store, world_size, killed) if found is not None}
        assert len(ids) <= 1
        assert not ids & seen
        seen |= ids
    (last,) = set(start(store, WORLD_SIZE, {}))
    assert last not in seen


def test_a_missing_rank_is_named_and_may_come_later(monkeypatch, caplog):
    monkeypatch.setattr(store_phase, "_FIRST_LINE_SECONDS", 0.01)
    store = dist.HashStore()
    coordinator, other = StartAgreement(0, 2), StartAgreement(1, 2)
    with pytest.raises(CoordinatorTimeoutError, match=r"start of the job.*rank 1"):
        coordinator.reach(store, 0.1)
    with pytest.raises(CoordinatorTimeoutError, match=r"rank 0"):
        other.reach(store, 0.1)
    lines = [line.partition("; ")[0] for line in caplog.messages]
    assert {*lines} == {f"phase 'agree on this start of the job': waiting for 1 of 2 ranks: {rank}" for rank in (0, 1)}
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda one: one.reach(store, 20), (coordinator, other))
    assert first == second


def rank_of_a_start(rank, port, answers, killed_before):
    """Run operations; a rank that is to be killed draws the number of its operation as the last that it does."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = []
    for number in range(3):
        with make_coordinator(timeout_seconds=30) as them:
            if (rank, number) == killed_before:
                os.kill(os.getpid(), signal.SIGKILL)
            found.append(them.all_gather("x", lambda: os.getpid()))  # noqa: PLW0108 - bound late
    answers.put((rank, found))
    threading.Event().wait(60)


def test_ranks_that_are_started_again_at_one_store_work_as_the_first_did():
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    for killed in ((1, 2), None):
        answers = context.Queue()
        processes = [
            context.Process(target=rank_of_a_start, args=(rank, server.port, answers, killed), daemon=True)
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        if killed is not None:
            processes[killed[0]].join(60)
        else:
            pids = [process.pid for process in processes]
            assert sorted(answers.get(timeout=250) for _ in range(2)) == [(rank, [pids] * 3) for rank in range(2)]
        for process in processes:
            process.kill()
            process.join()
        for key in server.list_keys():
            if "dcp/" not in key:  # gloo's own, by which it connects to the killed ranks if the others come late
                server.delete_key(key)

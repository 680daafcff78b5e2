"""Faults while the ranks agree about a signal: a rank is killed or stopped, the store is stopped. All others raise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from dcp_core import DcpError
from dcp_manager import CheckpointManager, EverySteps, OnSignal
from dcp_manager.alert import _Round
from dcp_ranks.testing.ranks import RankPool
from integration_tests.launcher import rank_environment
from integration_tests.manager.checkpoints import state

POLICY = EverySteps(10**6) | OnSignal({signal.SIGUSR1}, stop=set())
SIGNALLED = 1
"""Rank that gets the signal to save."""
STEPS = 6000
"""Steps after which a rank that never learns of the fault ends."""


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankPool]:
    """Ranks that are killed and stopped, apart from those of other tests."""
    with RankPool(3, timeout_seconds=240) as pool:
        yield pool


def train(root: str, victim: int, fault: signal.Signals, moment: str, timeout_seconds: float) -> str:
    """Return the type of the error that ends this rank's training."""
    rank, real, pid = dist.get_rank(), getattr(_Round, moment), Path(f"{root}.pid")

    def strike(self: _Round) -> Any:
        if rank == victim:
            pid.write_text(str(os.getpid()))
            os.kill(os.getpid(), fault)
        return real(self)

    dist.barrier()  # the timeout is for what follows, not for slow imports
    try:
        with (
            mock.patch.object(_Round, moment, strike),
            CheckpointManager(root, save_policy=POLICY, timeout_seconds=timeout_seconds) as manager,
        ):
            for step in range(1, STEPS):
                if step == 3 and rank == SIGNALLED:
                    os.kill(os.getpid(), signal.SIGUSR1)
                manager.maybe_save(step, state(step))
                time.sleep(0.01)
                if Path(f"{root}.ended").exists():  # a victim that was stopped
                    break
    except DcpError as error:
        return type(error).__name__
    finally:
        if rank == SIGNALLED and pid.exists() and fault is signal.SIGSTOP:
            Path(f"{root}.ended").touch()
            os.kill(int(pid.read_text()), signal.SIGCONT)
    return ""


ERRORS = {
    signal.SIGKILL: {"PeerLostError", "CoordinatorLostError"},
    signal.SIGSTOP: {"CoordinatorTimeoutError", "CoordinatorLostError"},
}


@pytest.mark.parametrize("moment", ["_send_answer", "_read_target"])
@pytest.mark.parametrize(("fault", "victim"), [(signal.SIGKILL, 0), (signal.SIGKILL, 2), (signal.SIGSTOP, 2)])
def test_a_rank_that_is_lost_while_ranks_agree_ends_the_wait(
    own_ranks: RankPool, tmp_path: Path, fault: signal.Signals, victim: int, moment: str
) -> None:
    dies = [victim] if fault is signal.SIGKILL else []
    timeout_seconds = 10.0 if fault is signal.SIGSTOP else 200.0  # a death is noticed without it
    found = own_ranks.run(3, train, str(tmp_path / "run"), victim, fault, moment, timeout_seconds, expect_death=dies)
    living = [error for rank, error in enumerate(found) if rank == SIGNALLED or (rank != victim and dies)]
    assert {*living} <= ERRORS[fault]


SERVE = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""
TRAIN = """
import os, sys, time
import torch.distributed as dist
from integration_tests.manager.checkpoints import state
from integration_tests.manager.test_alert_faults import POLICY, STEPS
from dcp_core import DcpError
from dcp_manager import CheckpointManager

dist.init_process_group("gloo")
try:
    with CheckpointManager(sys.argv[1], save_policy=POLICY, timeout_seconds=10.0) as manager:
        manager.maybe_save(1, state(1))
        dist.barrier()
        print("ready", flush=True)
        for step in range(2, STEPS):
            manager.maybe_save(step, state(step))
            time.sleep(0.01)
        print("never learned of it", flush=True)
except DcpError as error:
    print(type(error).__name__, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("is_signalled", [True, False], ids=["a signal", "no signal"])
def test_a_store_that_is_stopped_ends_the_wait(tmp_path: Path, is_signalled: bool) -> None:
    root = Path(__file__).resolve().parents[2]
    server = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    ranks: list[subprocess.Popen[str]] = []
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        for rank in range(2):
            environment = {**os.environ, **rank_environment(rank, 2, port), "PYTHONPATH": str(root)}
            command = [sys.executable, "-W", "ignore", "-c", TRAIN, str(tmp_path / "run")]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        for each in ranks:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        server.send_signal(signal.SIGSTOP)
        if is_signalled:
            ranks[SIGNALLED].send_signal(signal.SIGUSR1)
        assert [each.communicate(timeout=200)[0] for each in ranks] == ["CoordinatorLostError\n"] * 2
    finally:
        for each in (*ranks, server):
            each.kill()
            each.communicate()

"""What is lost when: each row of the tables of the page on memory, on three hosts with a rank and a keeper each."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp_all as dcp
from dcp_io import open_store
from dcp_memory import keeper_status, stop_keeper
from dcp_ranks.testing.ranks import RankPool
from integration_tests.hosts.pretended import promote_once, reads_below, without_promoter
from integration_tests.memory.hosts import RUN, Hosts, Near, kill, processes_of
from integration_tests.memory.lives import holds, state_of

HOSTS = ("a", "b", "c")
NEW = ("x", "y", "z")
STEPS, FAR, NEWEST = (2, 3), 2, 3
"""Steps that are saved; the one that the far tier has then, and the newest."""
_SECONDS = 60.0


def work(root: Path, near: Near, hosts: tuple[str, ...], saver: str | None, steps: tuple[int, ...]) -> dict[str, Any]:
    """Resume on hosts, and save steps; returns what was restored, and the files that were read in the far tier."""
    place = Hosts(root, near)
    with contextlib.ExitStack() as stack:
        stack.enter_context(place.job(hosts, 1, dist.get_rank()))
        stack.enter_context(without_promoter())
        seen = stack.enter_context(reads_below(place.far))
        saving = stack.enter_context(dcp.AsyncSaver(saver)) if saver else None
        manager = stack.enter_context(dcp.CheckpointManager(place.tiers(), saver=saving, timeout_seconds=_SECONDS))
        template = state_of(-1, 0)
        restored = manager.restore(template)
        step = 0 if restored is None else restored.step
        assert step == 0 or holds(template, state_of(step, 0))
        found = {"step": step, "far": [name for name, _ in seen]}
        for each in steps:
            manager.save(each, state_of(each, 0))
            manager.wait()
            protection = manager._upkeep._protection
            assert protection is None or protection.wait(_SECONDS)
            dist.barrier()
        found["protected"] = [manager.where(each).protected for each in steps]
    return found


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a short path; no keeper is left after the test."""
    place = Path(tempfile.mkdtemp(prefix="dcp-l-"))
    yield place
    hosts = Hosts(place, "keeper")
    for name in hosts.names():
        with hosts.on(name):
            stop_keeper(RUN)
        assert processes_of(hosts.folder(name)) == []
        assert [path for path in hosts.folder(name).rglob("*") if not path.is_dir()] == []
    kill(processes_of(place))
    shutil.rmtree(place)


def change_a_byte(hosts: Hosts) -> None:
    """Change a byte of what a host holds of the newest step, as a defect of its memory does."""
    with hosts.on("b"):
        store = open_store(f"{hosts.url}/step-{NEWEST}")
        (name,) = [entry.name for entry in store.list() if entry.name.startswith("__1_")]
        data = bytearray(store.read(name))
        data[len(data) // 2] ^= 1
        store.delete(name)
        sink = store.create(name)
        sink.write([data])
        sink.close()


def kill_keeper(hosts: Hosts) -> None:
    kill(processes_of(hosts.folder("b")))


def stop(hosts: Hosts) -> None:
    with hosts.on("b"):
        assert stop_keeper(RUN)


def lose(*names: str) -> Callable[[Hosts], None]:
    def act(hosts: Hosts) -> None:
        for name in names:
            hosts.lose(name)

    return act


def nothing(hosts: Hosts) -> None:
    """All processes that have saved have ended, and the keepers live."""


LOSSES: dict[str, tuple[Callable[[Hosts], None], tuple[str, ...], int, int]] = {
    # what happens, hosts of the restart, the step that it finds without copies, and with copies
    "all ranks are killed": (nothing, HOSTS, NEWEST, NEWEST),
    "on fewer ranks": (nothing, HOSTS[1:], FAR, NEWEST),
    "a keeper is killed": (kill_keeper, HOSTS, FAR, NEWEST),
    "a keeper is stopped": (stop, HOSTS, FAR, NEWEST),
    "a host is lost": (lose("b"), ("a", "c"), FAR, NEWEST),
    "a host is replaced": (lose("b"), ("a", "x", "c"), FAR, NEWEST),
    "two neighbours are lost": (lose("a", "b"), ("c", "x"), FAR, FAR),
    "power is lost": (lose(*HOSTS), HOSTS, FAR, FAR),
    "other hosts": (nothing, NEW, FAR, FAR),
    "a byte changes": (change_a_byte, HOSTS, FAR, NEWEST),
}
GATING = {("partner", "a keeper is killed"), ("partner", "a byte changes"), ("keeper", "a host is lost")}


@pytest.mark.parametrize(
    ("near", "loss", "saver"),
    [
        pytest.param(near, loss, saver, marks=() if saver is None and (near, loss) in GATING else pytest.mark.slow)
        for near in ("keeper", "partner")
        for loss in LOSSES
        for saver in (None, "thread", "process")
    ],
)
def test_what_a_restart_finds(ranks: RankPool, root: Path, near: Near, loss: str, saver: str | None) -> None:
    act, restart, alone, with_copies = LOSSES[loss]
    hosts = Hosts(root, near)
    found = ranks.run(3, work, root, near, HOSTS, saver, STEPS[:1])
    for host in HOSTS:
        with hosts.on(host):
            promote_once(hosts.tiers())
    found = ranks.run(3, work, root, near, HOSTS, saver, STEPS[1:])
    assert [one["step"] for one in found] == [FAR] * 3
    assert [one["protected"] for one in found] == [[near == "partner"]] * 3
    act(hosts)
    found = ranks.run(len(restart), work, root, near, restart, None, ())
    step = with_copies if near == "partner" else alone
    assert [one["step"] for one in found] == [step] * len(restart)
    # Of the step before, hosts that have lost nothing have their parts in memory.
    assert any(one["far"] for one in found) is (step == FAR and act is not change_a_byte)


@pytest.mark.slow  # a worker imports PyTorch
def test_the_process_that_saves_is_killed(root: Path) -> None:
    """What it was saving is lost by name; the step before is in memory, the memory is free, and the next save works."""
    hosts = Hosts(root, "keeper")
    with (
        hosts.on("a"),
        without_promoter(),
        dcp.AsyncSaver("process") as saver,
        dcp.CheckpointManager(hosts.tiers(), saver=saver) as manager,
    ):
        manager.save(1, state_of(1, 0))
        manager.wait()
        worker = saver.backend.worker.pid  # type: ignore[attr-defined]
        os.kill(worker, signal.SIGSTOP)
        future = manager.save(2, state_of(2, 0))
        assert future is not None
        kill([worker])
        with pytest.raises(dcp.DcpError, match="this save is lost"):
            manager.wait()
        template = state_of(0, 0)
        restored = manager.restore(template)
        assert restored is not None
        assert restored.step == 1
        assert holds(template, state_of(1, 0))
        until = time.monotonic() + _SECONDS
        while (status := keeper_status(RUN)) is not None and status.lent_bytes and time.monotonic() < until:
            time.sleep(0.01)
        assert status is not None
        assert status.lent_bytes == 0
        manager.save(3, state_of(3, 0))
        manager.wait()
        assert [record.step for record in manager.checkpoints()][-1] == 3

"""Hosts copy their parts of each save to the next host: a lost host loses nothing, and nothing is read from afar."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_base.hookspecs import CheckpointEvent, hookimpl
from dcp_core import plugins
from dcp_io.roots.copy_notes import CopyRequest, HostsCopied
from dcp_memory import partner
from dcp_ranks.testing.ranks import RankPool
from dcp_tiers.promotion import Promotion
from integration_tests.hosts.pretended import (
    NEAR,
    SHELF,
    folder_of,
    job_on,
    on_host,
    promote_on,
    reads_below,
    tiers_in,
    without_promoter,
)
from integration_tests.hosts.test_save_and_load import local, state_of

HOSTS = ["a", "b", "c", "d"]
WAIT_SECONDS = 200.0


class Watch:
    """Observer of the copies of this process."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str | None]] = []

    @hookimpl
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        if event.operation == "protect" and event.state != "progress":
            self.seen.append((event.phase, event.state, event.error))


def train(
    disks: str,
    hosts: list[str],
    steps: list[int],
    *,
    near: str = NEAR,
    keep: int = 1,
    far: bool = True,
    restores: bool = False,
    around: Callable[[], Any] | None = None,
    saver: str | None = None,
) -> dict[str, Any]:
    """Restore if asked to, save steps, and wait for each copy; returns what happened, and what was read from afar."""
    watch, found = Watch(), dict[str, Any]()
    plugins.register(watch, name="watch")
    try:
        tiers = lambda: tiers_in(disks, near, keep=keep, copies=partner(), far=far)  # noqa: E731
        with job_on(disks, hosts), without_promoter(), reads_below(f"{disks}/far") as seen:
            with (
                dcp.AsyncSaver(saver) if saver else mock.MagicMock() as saving,
                dcp.CheckpointManager(tiers(), timeout_seconds=200, saver=saving if saver else None) as manager,
            ):
                if restores:
                    template = state_of(99)
                    restored = manager.restore(template)
                    assert restored is not None
                    wanted = state_of(restored.step)
                    right = all(
                        torch.equal(local(template[key]), local(wanted[key])) for key in wanted if key != "seed"
                    )
                    found = {"step": restored.step, "right": right, "far": list(seen)}
                with around() if around is not None else mock.MagicMock():
                    for step in steps:
                        manager.save(step, state_of(step))
                        manager.wait()
                        assert waited(manager)
                        dist.barrier()
                kept = [record.step for record in manager.checkpoints()]
                found |= {"where": {step: manager.where(step).protected for step in kept}, "texts": str(kept)}
            dist.barrier()
    finally:
        plugins.unregister("watch")
    return found | {"events": watch.seen}


def waited(manager: dcp.CheckpointManager) -> bool:
    """Wait for the copy that runs; returns whether it has ended."""
    protection = manager._upkeep._protection
    return protection is None or protection.wait(WAIT_SECONDS)


def data(disks: Path, host: str, step: int) -> dict[str, int]:
    folder = Path(folder_of(disks, host, NEAR), f"step-{step}")
    return {file.name: file.stat().st_size for file in folder.glob("*.distcp")}


def ranks_in(names: Any) -> set[int]:
    """The ranks that have written files."""
    return {int(name.split("_")[2]) for name in names}


@pytest.mark.parametrize(
    ("count", "near"),
    [(2, NEAR), pytest.param(3, NEAR, marks=pytest.mark.slow), pytest.param(4, SHELF, marks=pytest.mark.slow)],
)
def test_after_each_save_all_is_protected(pool: RankPool, tmp_path: Path, count: int, near: str) -> None:
    hosts = HOSTS[:count]
    found = pool.run(2 * count, partial(train, near=near, far=False), str(tmp_path), hosts, [1, 2, 3])
    assert [one["where"] for one in found] == [{3: True}] * len(found)
    for number in range(count):
        before = (number - 1) % count
        wanted = {2 * number, 2 * number + 1, 2 * before, 2 * before + 1}
        assert ranks_in(data(tmp_path, hosts[number], 3)) == wanted
    events = [event for one in found for event in one["events"]]
    assert len(events) == 2 * 3 * count  # each host, each step: started, finished
    assert {event[:2] for event in events} == {("total", "started"), ("total", "finished")}


class Held:
    """Copies to partners, of which the first waits for a file."""

    def __init__(self, gate: Path) -> None:
        self.gate, self.copies = gate, partner()

    def copy(self, coordinator: Any, request: CopyRequest) -> HostsCopied:
        while not self.gate.exists():
            time.sleep(0.01)
        return self.copies.copy(coordinator, request)


def save_while_a_copy_runs(disks: str, saver: str | None) -> tuple[dict[int, bool], list[Any]]:
    """Save five steps while the first one is copied; returns which steps are there and protected, and the events."""
    gate, watch = Path(disks, "gate"), Watch()
    plugins.register(watch, name="watch")
    try:
        with (
            job_on(disks, HOSTS[:2]),
            dcp.AsyncSaver(saver) if saver else mock.MagicMock() as saving,
            dcp.CheckpointManager(
                tiers_in(disks, keep=1, copies=Held(gate), far=False),
                timeout_seconds=60,
                saver=saving if saver else None,
            ) as manager,
        ):
            for step in range(1, 6):
                manager.save(step, state_of(step))
            manager.wait()
            dist.barrier()
            gate.touch()
            assert waited(manager)
            dist.barrier()
            kept = [record.step for record in manager.checkpoints()]
            return {step: manager.where(step).protected for step in kept}, watch.seen
    finally:
        plugins.unregister("watch")


@pytest.mark.parametrize("saver", [None, "thread"])
def test_the_last_save_is_protected_though_copies_are_slow(pool: RankPool, tmp_path: Path, saver: str | None) -> None:
    found = pool.run(4, save_while_a_copy_runs, str(tmp_path), saver)
    assert [there for there, _ in found] == [{5: True}] * 4
    ends = [event for _, events in found for event in events if event[1:2] != ("started",)]
    assert sorted(event[:2] for event in ends) == [("skip", "failed")] * 3 + [("total", "finished")] * 4
    assert all("when a later one was saved" in error for phase, _, error in ends if phase == "skip")


@pytest.mark.parametrize(("count", "near"), [(2, NEAR), pytest.param(3, SHELF, marks=pytest.mark.slow)])
def test_the_newest_step_is_restored_without_the_lost_host(
    pool: RankPool, tmp_path: Path, count: int, near: str
) -> None:
    hosts = HOSTS[:count]
    pool.run(2 * count, partial(train, near=near), str(tmp_path), hosts, [1])
    assert promote_on(tmp_path, hosts, near) == {}
    pool.run(2 * count, partial(train, near=near), str(tmp_path), hosts, [2])
    saved = tmp_path / "saved"
    shutil.copytree(tmp_path, saved, ignore=lambda _, names: {"saved"} & {*names})
    for lost in hosts:
        disks = tmp_path / f"without {lost}"
        shutil.copytree(saved, disks)
        shutil.rmtree(folder_of(disks, lost, NEAR))
        left = [host for host in hosts if host != lost]
        found = pool.run(2 * len(left), partial(train, near=near, restores=True), str(disks), left, [])
        assert [(one["step"], one["right"], one["far"]) for one in found] == [(2, True, [])] * len(found)
    shutil.rmtree(folder_of(saved, hosts[0], NEAR))
    found = pool.run(2 * count, partial(train, near=near, restores=True), str(saved), ["new", *hosts[1:]], [3])
    assert [(one["step"], one["right"], one["far"]) for one in found] == [(2, True, [])] * len(found)
    there = {2: False, 3: True}  # the far tier must still get step 2
    assert [one["where"] for one in found] == [{3: True}] * 2 + [there] * (len(found) - 2)


def bring(disks: Path, host: str) -> bool:
    """Promote what a host has; returns whether the far tier has all then."""
    with on_host(disks, host):
        return Promotion(tiers_in(disks), 1).run(lambda _: False)


def test_each_file_reaches_the_far_tier_once_and_a_lost_hosts_from_its_partner(pool: RankPool, tmp_path: Path) -> None:
    pool.run(6, train, str(tmp_path), HOSTS[:3], [1])
    far = tmp_path / "far/step-1"
    for number, host in enumerate("ac"):
        before = {path.name for path in far.glob("*.distcp")}
        assert not bring(tmp_path, host)
        rank = 2 * HOSTS.index(host)
        assert ranks_in({path.name for path in far.glob("*.distcp")} - before) == {rank, rank + 1}, number
    shutil.rmtree(folder_of(tmp_path, "b", NEAR))
    assert not bring(tmp_path, "c")  # b may come back
    pool.run(4, partial(train, restores=True), str(tmp_path), ["a", "c"], [])
    assert bring(tmp_path, "c")
    assert dcp.verify_checkpoint(far).ok

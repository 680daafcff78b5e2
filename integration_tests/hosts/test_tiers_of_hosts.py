"""Four pretended hosts with two ranks each, whose manager saves to a tier of each host and promotes to a shared one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_ranks.testing.ranks import RankPool
from integration_tests.hosts.pretended import (
    NEAR,
    folder_of,
    hangs_below,
    job_on,
    on_host,
    promote_on,
    reads_below,
    tiers_in,
    without_promoter,
)
from integration_tests.hosts.test_save_and_load import local, state_of

HOSTS = ["a", "b", "c", "d"]


def manage(disks: str, hosts: list[str], steps: list[int], restores: bool, near: str = NEAR) -> dict[str, Any]:
    """Restore, and save steps, without a promoter; returns the restored step, whether it is right, and far reads."""
    found: dict[str, Any] = {}
    with job_on(disks, hosts), without_promoter(), reads_below(f"{disks}/far") as seen:
        with dcp.CheckpointManager(tiers_in(disks, near), timeout_seconds=60) as manager:
            if restores:
                template = state_of(99)
                restored = manager.restore(template)
                assert restored is not None
                wanted = state_of(restored.step)
                right = all(torch.equal(local(template[key]), local(wanted[key])) for key in wanted if key != "seed")
                found = {"step": restored.step, "right": right, "far": list(seen)}
            for step in steps:
                manager.save(step, state_of(step))
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 on the disks of four hosts; step 1 in the far tier, too."""
    disks = tmp_path_factory.mktemp("saved")
    pool.run(8, manage, str(disks), HOSTS, [1], False)
    assert promote_on(disks, HOSTS) == {}
    pool.run(8, manage, str(disks), HOSTS, [2], False)
    return disks


def lose(saved: Path, tmp_path: Path, host: str | None) -> Path:
    disks = tmp_path / "disks"
    shutil.copytree(saved, disks)
    if host is not None:
        shutil.rmtree(folder_of(disks, host, NEAR))
    return disks


def check(found: list[dict[str, Any]], step: int) -> list[tuple[str, int]]:
    assert [(one["step"], one["right"]) for one in found] == [(step, True)] * len(found)
    return [read for one in found for read in one["far"]]


@pytest.mark.parametrize("hosts", [HOSTS, ["d", "c", "b", "a"]], ids=["same order", "reversed"])
def test_without_a_loss_the_newest_step_comes_from_the_hosts(
    pool: RankPool, saved: Path, tmp_path: Path, hosts: list[str]
) -> None:
    disks = lose(saved, tmp_path, None)
    assert check(pool.run(8, manage, str(disks), hosts, [], True), 2) == []


@pytest.mark.parametrize("hosts", [["a"], ["c", "a"], ["d", "a", "c"], ["a", "new", "c", "d"]], ids=len)
def test_after_the_loss_of_a_host_the_newest_complete_step_wins(
    pool: RankPool, saved: Path, tmp_path: Path, hosts: list[str]
) -> None:
    disks = lose(saved, tmp_path, "b")
    found = pool.run(2 * len(hosts), manage, str(disks), hosts, [3], True)
    read = check(found, 1)  # of step 2 the lost host had a part
    here = {name.name for host in hosts for name in Path(folder_of(disks, host, NEAR)).glob("step-1/*.distcp")}
    assert read
    assert not {name for name, _ in read} & here
    lost = [file for file in (disks / "far/step-1").glob("*.distcp") if file.name not in here]
    assert {name for name, _ in read} == {file.name for file in lost}
    assert sum(size for _, size in read) <= sum(file.stat().st_size for file in lost)
    assert check(pool.run(2 * len(hosts), manage, str(disks), hosts, [], True), 3) == []


def test_a_lost_hosts_part_of_the_newest_step_comes_from_the_far_tier(
    pool: RankPool, saved: Path, tmp_path: Path
) -> None:
    disks = lose(saved, tmp_path, None)
    assert promote_on(disks, HOSTS) == {}
    shutil.rmtree(folder_of(disks, "a", NEAR))
    read = check(pool.run(8, manage, str(disks), ["new", "d", "b", "c"], [], True), 2)
    assert {name[:4] for name, _ in read} <= {"__0_", "__1_"}
    lost = list((disks / "far/step-2").glob("__[01]_*.distcp"))
    assert sum(size for _, size in read) <= sum(file.stat().st_size for file in lost)


def test_hosts_that_were_never_in_one_job_are_of_one_run(pool: RankPool, tmp_path: Path) -> None:
    disks = str(tmp_path)
    pool.run(4, manage, disks, ["a", "b"], [1], False)
    assert promote_on(disks, ["a", "b"]) == {}
    check(pool.run(4, manage, disks, ["x", "y"], [2], True), 1)
    check(pool.run(4, manage, disks, ["y", "a"], [3], True), 1)  # a part of step 2 is on x
    assert check(pool.run(4, manage, disks, ["a", "y"], [], True), 3) == []


def test_who_brings_the_last_part_publishes(saved: Path, tmp_path: Path) -> None:
    disks = lose(saved, tmp_path, None)
    for number, host in enumerate(["c", "a", "d", "b"]):
        assert not (disks / "far/step-2/.metadata").exists()
        left = promote_on(disks, [host])
        assert left == ({f"{disks}/far": [2]} if number < 3 else {})
    near = Path(folder_of(disks, "a", NEAR), "step-2/.metadata")
    assert (disks / "far/step-2/.metadata").read_bytes() == near.read_bytes()
    assert promote_on(disks, HOSTS) == {}
    names = {file.name for file in (disks / "far/step-2").iterdir()}
    assert all(name in (".metadata", ".dcp-note.json") or name.endswith(".distcp") for name in names), names
    assert dcp.verify_checkpoint(disks / "far/step-2").ok


def test_a_step_of_a_host_that_is_gone_does_not_hold_up_later_ones(pool: RankPool, saved: Path, tmp_path: Path) -> None:
    disks = lose(saved, tmp_path, "b")
    promote_on(disks, ["a", "c", "d"])
    pool.run(6, manage, str(disks), ["a", "c", "d"], [3], True)
    promote_on(disks, ["a", "c", "d"])
    assert (disks / "far/step-3/.metadata").exists()
    promote_on(disks, ["a", "c", "d"])
    with on_host(disks, "a"):
        assert tiers_in(disks).latest() == 3


def test_a_crash_before_the_other_hosts_have_the_index_is_mended_at_the_next_start(
    pool: RankPool, saved: Path, tmp_path: Path
) -> None:
    disks = lose(saved, tmp_path, None)
    for host in ("b", "c", "d"):
        Path(folder_of(disks, host, NEAR), "step-2/.metadata").unlink()
    assert check(pool.run(8, manage, str(disks), ["b", "c", "d", "a"], [], True), 2) == []
    indexes = {Path(folder_of(disks, host, NEAR), "step-2/.metadata").read_bytes() for host in HOSTS}
    assert len(indexes) == 1


def resume_while_the_far_tier_hangs(disks: str, hosts: list[str]) -> dict[str, Any]:
    with hangs_below(f"{disks}/far"):
        return manage(disks, hosts, [3], True)


def test_a_far_tier_that_hangs_does_not_stop_hosts_that_have_all(pool: RankPool, saved: Path, tmp_path: Path) -> None:
    disks = lose(saved, tmp_path, None)
    assert check(pool.run(8, resume_while_the_far_tier_hangs, str(disks), ["b", "a", "d", "c"]), 2) == []
    assert check(pool.run(8, manage, str(disks), HOSTS, [], True), 3) == []

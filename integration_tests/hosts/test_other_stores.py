"""Stores of each host that are no folders: saves, loads, managers and promotion work on them as on hosts' disks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import dcp_all as dcp
from dcp_ranks.testing.ranks import RankPool
from integration_tests.hosts.pretended import NEAR, SHELF, folder_of, on_host, promote_on, tiers_in
from integration_tests.hosts.test_save_and_load import HOSTS, load, save
from integration_tests.hosts.test_tiers_of_hosts import check, manage

ID = f"{SHELF}/step-1"


@pytest.mark.slow
def test_a_save_is_on_each_host_and_loads_on_others(pool: RankPool, tmp_path: Path) -> None:
    pool.run(8, save, str(tmp_path), HOSTS, 1, ID)
    indexes = {Path(folder_of(tmp_path, host, NEAR), "step-1/.metadata").read_bytes() for host in HOSTS}
    assert len(indexes) == 1
    hosts = ["c", "a", "d", "b"]
    assert pool.run(4, load, str(tmp_path), hosts, 1, ID) == [(True, [])] * 4
    pool.run(8, save, str(tmp_path), hosts, 2, ID)
    assert pool.run(8, load, str(tmp_path), HOSTS, 2, ID) == [(True, [])] * 8


@pytest.mark.parametrize("hosts", [pytest.param(["new", "d", "b", "c"], marks=pytest.mark.slow), ["b", "d"]], ids=len)
def test_a_lost_hosts_part_comes_from_the_far_tier(pool: RankPool, tmp_path: Path, hosts: list[str]) -> None:
    pool.run(8, manage, str(tmp_path), HOSTS, [1, 2, 3], False, SHELF)
    assert promote_on(tmp_path, HOSTS[:3], SHELF) == {f"{tmp_path}/far": [1, 2, 3]}
    assert promote_on(tmp_path, HOSTS, SHELF) == {}
    assert dcp.verify_checkpoint(tmp_path / "far/step-3").ok
    pool.run(8, manage, str(tmp_path), HOSTS, [4], False, SHELF)
    with on_host(tmp_path, "c"):
        found = tiers_in(tmp_path, SHELF)
        assert found.latest() == 4
        assert [step.step for step in found.steps() if 0 in step.complete_in] == [3, 4]
    shutil.rmtree(folder_of(tmp_path, "a", NEAR))
    read = check(pool.run(2 * len(hosts), manage, str(tmp_path), hosts, [5], True, SHELF), 3)
    assert read
    assert check(pool.run(2 * len(hosts), manage, str(tmp_path), hosts, [], True, SHELF), 5) == []

"""A job of four hosts resumes on one to four of them, after it has lost none or one, while the slow tier lags behind.

What must be restored is said by a model that knows only which host had which file.
"""

from __future__ import annotations

import itertools
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dcp_ranks.testing.ranks import RankPool
from integration_tests.hosts.pretended import NEAR, folder_of, promote_on
from integration_tests.hosts.test_tiers_of_hosts import HOSTS, manage

FAR = {"an older step": (), "parts of the newest step": ("a", "c"), "the newest step": HOSTS}
"""Hosts whose parts of step 2 the slow tier has; it has all of step 1."""
LOST = (None, *HOSTS)


@dataclass(frozen=True)
class Case:
    """One resumption."""

    far: str
    lost: str | None
    hosts: tuple[str, ...]

    @property
    def here(self) -> set[str]:
        """The hosts whose disks the job has."""
        return {*self.hosts} & {*HOSTS} - {self.lost}

    @property
    def step(self) -> int:
        """The newest step that is complete over the hosts of the job and the slow tier."""
        return 2 if self.here.union(FAR[self.far]) == {*HOSTS} else 1


def drawn() -> list[Any]:
    """All combinations on hosts drawn at random; a tenth of them gates."""
    chance = random.Random(23)
    cases = []
    for far, lost, count in itertools.product(FAR, LOST, range(1, 5)):
        there = [host for host in (*HOSTS, "new") if host != lost]
        cases.append(Case(far, lost, tuple(chance.sample(there if lost else HOSTS, count))))
    gating = {*chance.sample(range(len(cases)), len(cases) // 10)}
    return [
        pytest.param(
            case,
            id=f"{case.far}-without {case.lost}-on {''.join(host[0] for host in case.hosts)}".replace(" ", "_"),
            marks=() if number in gating else pytest.mark.slow,
        )
        for number, case in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The disks before the loss, for each state of the slow tier."""
    made = {}
    for far, brought in FAR.items():
        disks = made[far] = tmp_path_factory.mktemp("saved")
        pool.run(8, manage, str(disks), HOSTS, [1], False)
        assert promote_on(disks, HOSTS) == {}
        pool.run(8, manage, str(disks), HOSTS, [2], False)
        promote_on(disks, brought)
        assert (disks / "far/step-2/.metadata").exists() is (brought == HOSTS)
    return made


@pytest.mark.parametrize("case", drawn())
def test_the_newest_complete_step_is_restored(
    pool: RankPool, saved: dict[str, Path], tmp_path: Path, case: Case
) -> None:
    disks = tmp_path / "disks"
    shutil.copytree(saved[case.far], disks)
    if case.lost is not None:
        shutil.rmtree(folder_of(disks, case.lost, NEAR))
    here = {
        path.name
        for host in case.here
        for path in Path(folder_of(disks, host, NEAR)).glob(f"step-{case.step}/*.distcp")
    }
    lost = {
        path.name: path.stat().st_size
        for path in (disks / f"far/step-{case.step}").glob("*.distcp")
        if path.name not in here
    }
    found = pool.run(2 * len(case.hosts), manage, str(disks), list(case.hosts), [], True)
    assert [(one["step"], one["right"]) for one in found] == [(case.step, True)] * len(found)
    read = [each for one in found for each in one["far"]]
    assert {name for name, _ in read} == lost.keys()
    if here:  # else the ranks load as from any folder: what all have, each may read for itself
        assert sum(size for _, size in read) <= sum(lost.values())

"""A rank that saves is killed before, and in the middle of, each of its calls to the system, one after another.

What loads afterwards is exactly the old or exactly the new checkpoint, it is found as the latest valid one, the next
save succeeds, and nothing but that save's files remains. `packages/dcp-io/tests/test_crash_points.py` does the same to
the storage alone; here whole saves run on real ranks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import dcp_all as dcp
from dcp_core.errors import CheckpointNotFoundError
from integration_tests.robustness import states
from integration_tests.robustness.zygote import Job, RankEnd, Zygote

OLD, NEW, NEXT, BESIDE = 1, 2, 3, 4
LONG_AGO = 1_000_000_000
Made = Callable[[str, int], Path]


@dataclass(frozen=True)
class Scenario:
    """What is in the folder, and which save is killed on which rank."""

    name: str
    before: str | None
    world: int = 1
    victim: int = 0
    options: dict[str, Any] = field(default_factory=dict)


RANK_LOCAL = {"use_collectives": False}
SCENARIOS = [
    Scenario("re-save", "torch"),
    Scenario("re-save-raw-file-per-item", "raw", options={"layout": "raw", "single_file_per_rank": False}),
    Scenario("first-save", None),
    Scenario("re-save-rank-0-of-2", "torch", world=2, victim=0),
    Scenario("re-save-rank-1-of-2", "torch", world=2, victim=1),
    Scenario("first-save-rank-0-of-2", None, world=2, victim=0),
    Scenario("rank-local-rank-0-of-2", "rank-local", world=2, victim=0, options=RANK_LOCAL),
    Scenario("rank-local-rank-1-of-2", "rank-local", world=2, victim=1, options=RANK_LOCAL),
    Scenario("rank-local-over-global-0-of-2", "torch", world=2, victim=0, options=RANK_LOCAL),
    Scenario("rank-local-over-global-1-of-2", "torch", world=2, victim=1, options=RANK_LOCAL),
    Scenario("global-over-rank-local-0-of-2", "rank-local", world=2, victim=0),
    Scenario("over-stock-0-of-2", "stock", world=2, victim=0),
]


@pytest.fixture
def root(made: Made, tmp_path: Path) -> Path:
    """A folder of checkpoints with an older one in it, which nothing may touch."""
    beside = Path(shutil.copytree(made("torch", BESIDE), tmp_path / "root" / "beside"))
    os.utime(beside / ".metadata", (LONG_AGO, LONG_AGO))
    return tmp_path / "root"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_killed_at_every_call(
    zygote: Zygote, made: Made, root: Path, scenario: Scenario, every: int, record_property: Any
) -> None:
    """Jobs of two ranks take longer: there only every third call is struck, unless all tests are asked for."""
    every = every if scenario.world > 1 else 1
    found: list[bool] = []
    beside = contents(root / "beside")

    def strike(number: int, what: str) -> RankEnd:
        folder = root / "job"
        shutil.rmtree(folder, ignore_errors=True)
        if scenario.before is not None:
            shutil.copytree(made(scenario.before, OLD), folder)
        options = dict(scenario.options)
        ends = zygote.run(Job("save", str(folder), NEW, scenario.world, scenario.victim, (number, what), options))
        found.append(check_what_is_left(root, ends, exists=scenario.before is not None))
        assert contents(root / "beside") == beside
        return ends[scenario.victim]

    number = 1
    while not (end := strike(number, "kill")).survived:
        number += every
    assert number > (5 if scenario.victim else 20)
    assert found == sorted(found), "a later kill brought the old checkpoint back"
    assert found[-1]
    assert not found[0]
    for number, name in enumerate(end.calls, 1):
        if name == "pwritev":
            assert not strike(number, "torn").survived
    record_property("kills", len(found) - 1)


def check_what_is_left(root: Path, ends: list[RankEnd], *, exists: bool) -> bool:
    """Whether the new checkpoint was found; everything that must be true is checked."""
    folder = root / "job"
    latest = dcp.latest_valid(root)
    assert latest is not None
    try:
        new = states.version_in(folder, [OLD, NEW]) == NEW
        assert latest.path == folder
    except CheckpointNotFoundError:
        assert not exists
        assert latest.path == root / "beside"
        new = False
    assert new or all(end.result is None for end in ends), "a rank was told that the save succeeded"
    states.save(folder, NEXT, no_dist=True)
    assert states.version_in(folder, [OLD, NEW, NEXT]) == NEXT
    left = states.debris(folder)
    assert all(map(states.MARKER_DEBRIS.fullmatch, left)), left
    if left:
        states.save(folder, NEXT, no_dist=True, stale_after_seconds=1e-9)
        assert states.debris(folder) == []
    return new

"""Two jobs in one folder: a process is suspended at each of its calls in turn while another one does all of its work.

Saves: exactly one of the two checkpoints is there in the end, whole; whoever lost was told. Loads: exactly the old or
the new checkpoint is loaded while another job replaces it and cleans up.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dcp_all as dcp
from dcp_crash import Fault
from dcp_crash.running import RankEnd
from dcp_io import SaveInProgressError
from integration_tests.oracle.kinds import same_bits
from integration_tests.robustness import states
from integration_tests.robustness.zygote import Job, Zygote

OLD, NEW, RIVAL = 1, 2, 3
Fresh = Callable[[str, int], Path]


def run_beside(zygote: Zygote, job: Job, action: Callable[[], None]) -> tuple[RankEnd, bool]:
    """Run `action` while the job's process is held; how the job ended, and whether it was ever held."""
    held = zygote.begin(job)
    action()
    if held:
        zygote.go_on()
    (end,) = zygote.end().ranks
    return end, held


@pytest.mark.traced
@pytest.mark.timeout(600)
@pytest.mark.parametrize("before", [pytest.param("torch", marks=pytest.mark.slow), None])
def test_two_saves(zygote: Zygote, fresh: Fresh, tmp_path: Path, before: str | None) -> None:
    outcomes = set()
    suspended = True
    number = 0
    while suspended:
        number += 1
        folder = tmp_path / "empty"
        shutil.rmtree(folder, ignore_errors=True)
        folder = folder if before is None else fresh(before, OLD)
        rival: list[bool] = []

        def save(folder: Path = folder, rival: list[bool] = rival) -> None:
            try:
                states.save(folder, RIVAL, no_dist=True)
                rival.append(True)
            except SaveInProgressError as error:
                assert "wait for it" in str(error)
                rival.append(False)

        end, suspended = run_beside(zygote, Job("save", str(folder), NEW, fault=Fault("stop", number)), save)
        won = end.error is None
        assert won or "SaveInProgressError" in end.error, end.error
        assert won or rival == [True], "both gave way"
        # When both succeeded, one came after the other: the suspended one had not begun, or had published.
        wanted = ({NEW} if won else set()) | ({RIVAL} if rival == [True] else set())
        assert states.version_in(folder, [OLD, NEW, RIVAL]) in wanted
        assert states.debris(folder) == []
        outcomes.add((won, rival[0], suspended))
    assert number > 20
    assert (True, False, True) in outcomes


def test_two_saves_at_once(fresh: Fresh) -> None:
    """Threads of one process, not in step: what one of them saved is there, and nobody waits for ever."""

    def save(folder: Path, version: int) -> int | None:
        try:
            states.save(folder, version, no_dist=True)
        except SaveInProgressError:
            return None
        return version

    for _ in range(10):
        folder = fresh("torch", OLD)
        with ThreadPoolExecutor(3) as pool:
            done = [version for version in pool.map(save, [folder] * 3, [5, 6, 7]) if version is not None]
        assert done
        assert states.version_in(folder, [OLD, 5, 6, 7]) in done
        assert states.debris(folder) == []


@pytest.mark.traced
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["torch", pytest.param("rank-local", marks=pytest.mark.slow)])
def test_a_load_while_the_checkpoint_is_replaced(zygote: Zygote, fresh: Fresh, kind: str) -> None:
    loaded = []
    suspended = True
    while suspended:
        folder = fresh(kind, OLD)
        options = {"use_collectives": False} if kind == "rank-local" else {}

        def save(folder: Path = folder, options: dict[str, Any] = options) -> None:
            states.save(folder, NEW, no_dist=True, **options)

        job = Job("load", str(folder), fault=Fault("stop", len(loaded) + 1), options={"versions": [OLD, NEW]})
        end, suspended = run_beside(zygote, job, save)
        assert end.error is None, end.error
        loaded.append(end.result)
        assert states.version_in(folder, [OLD, NEW]) == NEW
    assert len(loaded) > 8
    assert loaded[0] == NEW
    assert loaded[-1] == OLD


class ReplacedWhileRead(dcp.FileSystemReader):
    """Has the checkpoint replaced once the whole plan is made."""

    replaced = False

    def read_data(self, plan: Any, planner: Any) -> Any:
        if not self.replaced and os.environ["RANK_THAT_SAVES"] == "1":
            states.save(self.path, NEW, no_dist=True)
        self.replaced = True
        return super().read_data(plan, planner)


def load_while_replaced(folder: str) -> tuple[bool, bool]:
    import torch.distributed as dist

    os.environ["RANK_THAT_SAVES"] = str(dist.get_rank())
    template = states.sharded(0)
    dcp.load(template, storage_reader=ReplacedWhileRead(folder))
    return same_bits(template, states.sharded(OLD)), same_bits(template, states.sharded(NEW))


def test_ranks_that_load_while_the_checkpoint_is_replaced(ranks: Any, fresh: Fresh) -> None:
    """Rank 1 finds its files gone, rank 0 may have read its own already: both end up with the new checkpoint."""
    assert ranks.run(2, load_while_replaced, str(fresh("torch", OLD))) in (
        [(False, True), (False, True)],
        [(True, False), (True, False)],
    )


@pytest.mark.traced
def test_a_save_in_the_next_folder(zygote: Zygote, fresh: Fresh, tmp_path: Path) -> None:
    """Saves of other folders under the same root do not see each other, whatever each of them is doing."""
    for number in (3, 8, 13, 18, 23):
        folder, other = fresh("torch", OLD), tmp_path / "other"
        job = Job("save", str(folder), NEW, fault=Fault("stop", number))
        end, suspended = run_beside(zygote, job, lambda other=other: states.save(other, RIVAL, no_dist=True))
        assert suspended
        assert end.error is None
        assert states.version_in(folder, [OLD, NEW]) == NEW
        assert states.version_in(other, [RIVAL]) == RIVAL


def test_a_job_without_an_end_leaves_the_zygote(zygote: Zygote, tmp_path: Path) -> None:
    for number in range(2):
        with pytest.raises(TimeoutError, match="did not end within"):
            zygote.run(Job("save", str(tmp_path / "late"), NEW, timeout_seconds=0.001))
        (end,) = zygote.run(Job("save", str(tmp_path / f"next-{number}"), NEW)).ranks
        assert end.error is None
        assert end.survived

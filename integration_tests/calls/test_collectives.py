"""Saving and loading together on 2 and 4 real ranks: failures, groups, threads, and ranks that disagree."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from integration_tests import failing

DEADLINE_SECONDS = 200.0  # of half an hour that ranks would wait otherwise; it takes a fraction of a second


def _check(told: failing.Told, bad_rank: int, phase: str, place: str) -> None:
    assert told.error == "CheckpointException", told.text
    assert told.failures == [bad_rank]
    for part in (f"phase {phase!r}", f"rank {bad_rank}", "Traceback", "UnpicklableError: failed on purpose"):
        assert part in told.text, part
    assert told.seconds < DEADLINE_SECONDS, place


@pytest.mark.parametrize("place", failing.SAVE_PLACES)
def test_save_that_fails_on_one_rank_fails_on_all(ranks: Any, tmp_path: Path, place: str) -> None:
    phase, coordinators = failing.SAVE_PLACES[place]
    bad_rank = 0 if coordinators else 1
    folder = tmp_path / "checkpoint"
    ranks.run(2, failing.save, str(folder), 1.0)
    before = failing.listed(str(folder))
    for told, left, works in ranks.run(2, failing.save_failing, str(folder), place, bad_rank, 2.0):
        _check(told, bad_rank, phase, place)
        assert left == before
        assert works
    assert ranks.run(2, failing.load, str(folder), 1.0) == [True, True]


@pytest.mark.parametrize("place", failing.LOAD_PLACES)
def test_load_that_fails_on_one_rank_fails_on_all(ranks: Any, tmp_path: Path, place: str) -> None:
    phase, coordinators = failing.LOAD_PLACES[place]
    bad_rank = 0 if coordinators else 1
    folder = tmp_path / "checkpoint"
    ranks.run(2, failing.save, str(folder), 1.0)
    before = failing.listed(str(folder))
    for told, left, works in ranks.run(2, failing.load_failing, str(folder), place, bad_rank, 1.0):
        _check(told, bad_rank, phase, place)
        assert left == before
        assert works


@pytest.mark.parametrize("place", ["state_dict", "resolve_data", "finish"])
def test_first_save_of_four_ranks_that_fails_leaves_nothing(ranks: Any, tmp_path: Path, place: str) -> None:
    phase, coordinators = failing.SAVE_PLACES[place]
    bad_rank = 0 if coordinators else 3
    ranks.run(4, failing.save, str(tmp_path / "before"), 1.0)  # new processes first import what a save needs
    for told, left, works in ranks.run(4, failing.save_failing, str(tmp_path / "new"), place, bad_rank, 2.0):
        _check(told, bad_rank, phase, place)
        assert left == []
        assert works


@pytest.mark.parametrize(("saving", "loading"), [(2, 4), (4, 2), (4, 1)])
def test_other_number_of_ranks(ranks: Any, tmp_path: Path, saving: int, loading: int) -> None:
    ranks.run(saving, failing.save, str(tmp_path), 3.0)
    assert ranks.run(loading, failing.load, str(tmp_path), 3.0) == [True] * loading


def _save_to_own_place(folder: str) -> str:
    rank = dist.get_rank()
    try:
        dcp.save({"x": torch.ones(2)}, checkpoint_id=f"{folder}/{'left' if rank < 3 else 'right'}")
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def _load_from_own_place(folder: str) -> str:
    try:
        dcp.load({"x": torch.ones(2)}, checkpoint_id=f"{folder}/{dist.get_rank()}")
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_ranks_that_name_different_checkpoints_are_told_so(ranks: Any, tmp_path: Path) -> None:
    for text in ranks.run(4, _save_to_own_place, str(tmp_path)):
        assert text.startswith("OperationError: ")
        for part in ("ranks 0-2", f"{tmp_path}/left", "rank 3", f"{tmp_path}/right"):
            assert part in text
    assert list(tmp_path.iterdir()) == []
    for text in ranks.run(2, _load_from_own_place, str(tmp_path)):
        assert "rank 0" in text
        assert "rank 1" in text
        assert f"{tmp_path}/1" in text


def _save_with_other_planners(folder: str) -> str:
    class Own(dcp.SavePlanner):
        """A planner that is not one of ours; never asked for anything."""

        set_up_planner = create_local_plan = create_global_plan = finish_plan = resolve_data = None

    planner = Own() if dist.get_rank() else dcp.DefaultSavePlanner()
    try:
        dcp.save({"x": torch.ones(2)}, checkpoint_id=folder, planner=planner)
    except ValueError as error:
        return str(error)
    return "saved"


def test_ranks_with_different_planners_are_told_so(ranks: Any, tmp_path: Path) -> None:
    for text in ranks.run(2, _save_with_other_planners, str(tmp_path)):
        assert "DefaultSavePlanner" in text
        assert "Own" in text


class _Counting(dcp.DefaultLoadPlanner):
    """Wants the plans of all ranks."""

    def create_global_plan(self, global_plan: list[Any]) -> list[Any]:
        self.counts = [len(plan.items) for plan in global_plan]
        return super().create_global_plan(global_plan)


def _refuse_to_travel(self: Any, protocol: int) -> Any:
    raise TypeError("a plan was sent")


def _load_plans(folder: str) -> tuple[list[str], list[int] | None, list[int] | None]:
    rank = dist.get_rank()
    dcp.save(failing.state(1.0), checkpoint_id=folder)
    with mock.patch.object(dcp.planner.LoadPlan, "__reduce_ex__", _refuse_to_travel):
        report = dcp.load(failing.state(0.0), checkpoint_id=folder)
    counting = _Counting()
    dcp.load(failing.state(0.0), checkpoint_id=folder, planner=counting)
    first = _Counting()  # one rank's wish is enough
    dcp.load(failing.state(0.0), checkpoint_id=folder, planner=dcp.DefaultLoadPlanner() if rank else first)
    return sorted(report.loaded), getattr(counting, "counts", None), getattr(first, "counts", None)


def test_load_plans_travel_only_to_a_planner_that_wants_them(ranks: Any, tmp_path: Path) -> None:
    (loaded, counts, first), (other, *rest) = ranks.run(2, _load_plans, str(tmp_path))
    assert loaded == other == ["all", "counter.name", "counter.value", "rows"]
    assert (counts, first, rest) == ([4, 4], [4, 4], [None, None])


def _in_sub_groups(folder: str) -> tuple[str, bool, bool, list[str]]:
    """Pairs of ranks save and load beside each other; the groups' own ranks are not those of the job."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    group, value = groups[mine], float(mine + 1)
    dcp.save(failing.state(value, group=group), checkpoint_id=f"{folder}/{mine}", process_group=group)
    template = failing.state(0.0, group=group)
    dcp.load(template, checkpoint_id=f"{folder}/{mine}", process_group=group)
    dist.barrier()
    other: dict[str, Any] = {"rows": torch.zeros(8, 5)}
    dcp.load(other, checkpoint_id=f"{folder}/{1 - mine}", process_group=group)
    try:
        dcp.save({"x": 1}, checkpoint_id=f"{folder}/wrong", process_group=groups[1 - mine])
    except ValueError as error:
        refused = str(error)
    dist.barrier()
    right = torch.equal(other["rows"], failing.full(3 - value))
    return refused, failing.loaded(value, template), right, failing.listed(f"{folder}/{mine}")


def test_sub_groups_save_side_by_side(ranks: Any, tmp_path: Path) -> None:
    for refused, loaded, right, names in ranks.run(4, _in_sub_groups, str(tmp_path)):
        assert (loaded, right) == (True, True)
        assert "not a rank of the process group" in refused
        assert {name[:4] for name in names} == {"__0_", "__1_", ".met"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def _alone(folder: str) -> list[str]:
    """One rank saves by itself while the others do something else."""
    rank = dist.get_rank()
    if rank == 1:
        dcp.save({"x": torch.full((2,), 7.0), "step": 3}, checkpoint_id=folder, no_dist=True)
    dist.barrier()
    template: dict[str, Any] = {"x": torch.zeros(2), "step": 0}
    if rank == 0:
        dcp.load(template, checkpoint_id=folder, no_dist=True)
        assert torch.equal(template["x"], torch.full((2,), 7.0))
        assert dcp.load_keys("step", checkpoint_id=folder, no_dist=True) == {"step": 3}
    dist.barrier()
    return failing.listed(folder)


def test_one_rank_saves_alone(ranks: Any, tmp_path: Path) -> None:
    for names in ranks.run(2, _alone, str(tmp_path)):
        assert [name[:4] for name in names] == [".met", "__0_"]


def _other_coordinator(folder: str) -> tuple[list[str], list[int], bool]:
    import os
    import warnings

    published: list[int] = []

    class Watched(dcp.FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            published.append(dist.get_rank())
            super().finish(metadata, results)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.save_state_dict(failing.state(4.0) | {"counter": 1}, Watched(folder), coordinator_rank=1)
        template = failing.state(0.0) | {"counter": 0}
        dcp.load_state_dict(template, dcp.FileSystemReader(folder), coordinator_rank=1)
    assert os.path.exists(f"{folder}/.metadata")
    local = failing.full(4.0).chunk(2)[dist.get_rank()]
    right = torch.equal(template["rows"].to_local(), local) and template["counter"] == 1
    return [each.category.__name__ for each in caught], published, right


def test_deprecated_functions_choose_the_coordinator(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks.run(2, _other_coordinator, str(tmp_path))
    assert first == (["FutureWarning"] * 2, [], True)
    assert second == (["FutureWarning"] * 2, [1], True)


class _Gate:
    """Lets the first save into user code, and keeps it there until the second is in user code, too."""

    def __init__(self) -> None:
        self.first, self.second = threading.Event(), threading.Event()

    def writer(self, folder: str, *, first: bool) -> Any:
        gate = self

        class Gated(dcp.FileSystemWriter):
            def storage_meta(self) -> Any:
                (gate.first if first else gate.second).set()
                assert gate.second.wait(120)
                return super().storage_meta()

        return Gated(folder)


def _two_at_once(folder: str) -> list[bool]:
    """Two saves from two threads over one group, while the trainer uses its collectives; then both are loaded."""
    gate = _Gate()  # makes the ranks start both in one order, which is what tells the saves apart
    with ThreadPoolExecutor(2) as threads:
        running = []
        for value, started in ((1.0, gate.first), (2.0, gate.second)):
            writer = gate.writer(f"{folder}/{value}", first=value == 1.0)
            running.append(threads.submit(dcp.save, failing.state(value), storage_writer=writer))
            assert started.wait(120)
        for _ in range(50):
            dist.all_reduce(torch.ones(1))
        for each in running:
            each.result(120)
    dist.barrier()
    return [failing.load(f"{folder}/{value}", value) for value in (1.0, 2.0)]


def test_two_saves_overlap_on_one_group(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, _two_at_once, str(tmp_path)) == [[True, True]] * 2

"""Saving, keeping, finding and resuming in one process, on the local file system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import CheckpointNotFoundError, LoadMismatchError, save
from dcp_fs import FileSystemReader
from dcp_io import LocalStore
from dcp_io.roots.catalogue import Catalogue
from dcp_manager import (
    CheckpointManager,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
)
from integration_tests.kits.damage import flip
from integration_tests.manager.checkpoints import Failing, names, restored, state, steps


def damage(root: Path, step: int) -> None:
    (data,) = (root / f"step-{step}").glob("*.distcp")
    flip(data)


def test_saves_when_due_and_resumes_from_the_newest(tmp_path: Path) -> None:
    assert restored(tmp_path) is None
    with CheckpointManager(tmp_path, save_policy=EverySteps(3)) as manager:
        saved = [step for step in range(10) if manager.maybe_save(step, lambda step=step: state(step))]  # type: ignore[misc]
        assert saved == [3, 6, 9]
        assert [record.step for record in manager.checkpoints()] == saved
        assert manager.latest() == 9
        assert manager.checkpoint_id(9) == f"{tmp_path}/step-9"
    assert (tmp_path / "latest").read_text() == "step-9\n"
    assert restored(tmp_path) == 9
    assert restored(tmp_path, step=6) == 6
    with pytest.raises(CheckpointNotFoundError, match="step-7"):
        restored(tmp_path, step=7)


def test_state_is_not_asked_for_in_vain(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_policy=EverySteps(2)) as manager:
        assert not manager.maybe_save(1, lambda: pytest.fail("not due"))


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_policy=KeepLast(2)) as manager:
        for step in (9, 10, 100):
            manager.save(step, state(step))
    assert steps(tmp_path) == {"step-10", "step-100"}
    assert restored(tmp_path) == 100


@pytest.mark.parametrize("step", [-1, 1.5, "7", None, True])
def test_steps_are_whole_numbers(tmp_path: Path, step: Any) -> None:
    with CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match="step is"):
        manager.save(step, state())


def test_keeps_what_the_policies_say(tmp_path: Path) -> None:
    policy = KeepLast(2) | KeepBest(1, "loss") | KeepEvery(10)
    losses = {10: 5.0, 13: 1.0, 17: 2.0, 20: 9.0, 23: 4.0, 26: 3.0}
    for step, loss in losses.items():  # a new manager each time: what it needs to know is in the root
        with CheckpointManager(tmp_path, keep_policy=policy) as manager:
            manager.save(step, state(step), metrics={"loss": loss})
    assert steps(tmp_path) == {"step-10", "step-13", "step-20", "step-23", "step-26"}
    with CheckpointManager(tmp_path) as manager:
        assert {record.step: record.metrics["loss"] for record in manager.checkpoints()} == {
            step: losses[step] for step in (10, 13, 20, 23, 26)
        }


def test_the_newest_stays_whatever_the_policy_says(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_policy=KeepEvery(1000)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
            assert steps(tmp_path) == {f"step-{step}"}


def test_training_that_went_back_keeps_its_checkpoints(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (50, 100):
            manager.save(step, state(step))
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
        assert manager.restore(state(), step=50) is not None
        manager.save(60, state(60))
        assert steps(tmp_path) == {"step-60"}
        manager.save(70, state(70))
    assert steps(tmp_path) == {"step-70"}
    assert (tmp_path / "latest").read_text() == "step-70\n"
    assert restored(tmp_path) == 70


def test_what_is_being_read_stays(tmp_path: Path) -> None:
    catalogue = Catalogue(LocalStore(tmp_path), stale_after_seconds=3600)
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
        manager.save(1, state(1))
        with catalogue.reading(1):
            manager.save(2, state(2))
            assert steps(tmp_path) == {"step-1", "step-2"}
            assert restored(tmp_path, step=1) == 1
        manager.save(3, state(3))
    assert steps(tmp_path) == {"step-3"}


def test_what_is_about_to_go_is_not_read(tmp_path: Path) -> None:
    for step in (1, 2):
        save(state(step), checkpoint_id=tmp_path / f"step-{step}")
    (tmp_path / "step-2" / ".dcp-removing").write_text("{}")
    assert restored(tmp_path) == 1
    with pytest.raises(CheckpointNotFoundError, match="being removed"):
        restored(tmp_path, step=2)


def test_damaged_checkpoints_are_put_aside(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state(step))
    damage(tmp_path, 4)
    (tmp_path / "step-3" / ".metadata").write_bytes(b"nothing")
    assert restored(tmp_path) == 2
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest() == 2
        reasons = {record.step: record.quarantined for record in manager.checkpoints()}
        assert reasons[2] is None
        assert reasons[4] is not None
        assert ".distcp" in reasons[4]
        found = manager.restore(state())
        assert found is not None
        assert found.passed_over == (4, 3)
        manager.save(4, state(4))  # a new one in its place is good
        assert manager.latest() == 4
    assert restored(tmp_path) == 4


def test_missing_files_are_damage(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    (data,) = (tmp_path / "step-2").glob("*.distcp")
    data.unlink()
    assert restored(tmp_path) == 1


@pytest.mark.parametrize("lost", ["*.distcp", "*"])
def test_what_goes_missing_after_the_choice_is_passed_over(tmp_path: Path, lost: str) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state(step))

    def reader(checkpoint_id: str) -> FileSystemReader:
        for path in (tmp_path / "step-2").glob(lost):
            path.unlink()
        return FileSystemReader(checkpoint_id)

    assert restored(tmp_path, reader=reader) == 1
    # With its index gone it is no checkpoint any more, damaged or not.
    assert [record.step for record in CheckpointManager(tmp_path).checkpoints()] == ([1] if lost == "*" else [1, 2])


def test_when_all_are_damaged_nothing_begins_anew(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
    damage(tmp_path, 1)
    for _ in range(2):
        with pytest.raises(CheckpointNotFoundError, match=r"none of the checkpoints can be loaded .step 1: "):
            restored(tmp_path)


def test_a_template_that_does_not_fit_is_no_damage(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        with pytest.raises(LoadMismatchError):
            manager.restore({"other": torch.zeros(3)})
        assert manager.latest() == 1


def test_quarantined_ones_go_as_good_ones_would(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_policy=KeepLast(2)) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        damage(tmp_path, 2)
        assert manager.restore(state()) is not None
        manager.save(3, state(3))
        assert steps(tmp_path) == {"step-1", "step-2", "step-3"}
        manager.save(4, state(4))
        assert steps(tmp_path) == {"step-3", "step-4"}


def test_debris_of_killed_saves_goes(tmp_path: Path) -> None:
    killed = tmp_path / "step-5"
    killed.mkdir(parents=True)
    (killed / "__0_0.abc.distcp").write_bytes(bytes(5))
    other = tmp_path / "step-x"
    other.mkdir()
    (other / "mine").write_text("of the user")
    with CheckpointManager(tmp_path) as manager:
        manager.save(6, state(6))
    assert names(tmp_path) == {"latest", "step-6", "step-x"}


def test_files_of_others_stay(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
        manager.save(1, state(1))
        (tmp_path / "step-1" / "notes.txt").write_text("mine")
        manager.save(2, state(2))
        assert names(tmp_path / "step-1") == {"notes.txt"}
        assert manager.latest() == 2


def test_a_failed_save_leaves_nothing_and_removes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
        manager.save(1, state(1))
        with pytest.raises(OSError, match="full"):
            manager.save(2, {"bad": Failing(OSError("the disk is full"))})
        assert names(tmp_path) == {"latest", "step-1"}
        assert (tmp_path / "latest").read_text() == "step-1\n"
    assert restored(tmp_path) == 1


def test_a_failed_save_changes_nothing_of_the_checkpoint_before(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_policy=KeepBest(1, "loss")) as manager:
        manager.save(5, state(5), metrics={"loss": 1.0})
        manager.save(4, state(4), metrics={"loss": 9.0})
        before = manager.checkpoints()
        with pytest.raises(OSError, match="full"):
            manager.save(4, {"bad": Failing(OSError("the disk is full"))}, metrics={"loss": 0.1})
        assert manager.checkpoints() == before
        manager.save(6, state(6), metrics={"loss": 5.0})
    assert steps(tmp_path) == {"step-5", "step-6"}


def test_a_save_costs_the_same_whatever_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (calls.append(name), real(*args, **options))[1]

    for name in ("list", "folders", "read", "exists", "publish", "delete"):
        monkeypatch.setattr(LocalStore, name, counted(name, getattr(LocalStore, name)))
    made = []
    with CheckpointManager(tmp_path) as manager:
        manager.save(100, {"step": 100})
        for there in (0, 50):
            for step in range(there):
                folder = tmp_path / f"step-{step}"
                folder.mkdir()
                (folder / ".metadata").write_text("index")
            calls.clear()
            manager.save(101 + there, {"step": 101})
            made.append(sorted(calls))
    assert made[0] == made[1]

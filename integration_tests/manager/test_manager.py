"""Saving, keeping, finding and resuming, in one process and on ranks, on the local file system."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_core import CheckpointException, CheckpointNotFoundError, LoadMismatchError, hookimpl, plugins, save
from dcp_core.hookspecs import CheckpointEvent
from dcp_fs import FileSystemReader
from dcp_io import LocalStore, StoreBackend
from dcp_manager import (
    CheckpointManager,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    OnRequest,
    OnSignal,
    UnfinishedSaveError,
)
from dcp_manager.catalogue import Catalogue


def state(value: float = 0.0) -> dict[str, Any]:
    return {"weight": torch.full((10_000,), float(value)), "step": int(value)}


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def steps(root: Path) -> set[str]:
    return names(root) - {"latest"}


def damage(root: Path, step: int) -> None:
    (data,) = (root / f"step-{step}").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def restored(root: Path | str, step: int | None = None, **options: Any) -> float | None:
    template = state(-1)
    with CheckpointManager(root, **options) as manager:
        found = manager.restore(template, step=step)
    if found is None:
        return None
    assert found.step == template["step"] == float(template["weight"][0])
    return found.step


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


@pytest.mark.parametrize("step", [-1, 1.5, "7", None])
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
    (killed / "__0_0.abc.distcp").write_bytes(b"half")
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


class Failing:
    """Raises while it is saved."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        raise self.error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


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


def test_failures_of_the_storage_can_be_tolerated(tmp_path: Path) -> None:
    full = {"bad": Failing(OSError("the disk is full"))}
    with CheckpointManager(tmp_path, tolerated_failures=2) as manager:
        assert manager.maybe_save(1, state(1))
        assert not manager.maybe_save(2, full)
        assert not manager.maybe_save(3, full)
        assert manager.maybe_save(4, state(4))
        assert not manager.maybe_save(5, full)
        assert not manager.maybe_save(6, full)
        with pytest.raises(OSError, match="full"):
            manager.maybe_save(7, full)
        with pytest.raises(RuntimeError, match="a bug"):
            manager.maybe_save(8, {"bad": Failing(RuntimeError("a bug"))})
    assert steps(tmp_path) == {"step-1", "step-4"}


def test_saves_by_time_and_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("dcp_manager.manager.time", SimpleNamespace(monotonic=lambda: now[0]))
    with CheckpointManager(tmp_path, save_policy=EverySeconds(20) | OnRequest()) as manager:
        assert not manager.maybe_save(1, state(1))
        manager.request_save()
        assert manager.maybe_save(2, state(2))
        assert not manager.maybe_save(3, state(3))
        now[0] += 25
        assert manager.maybe_save(4, state(4))
        assert not manager.maybe_save(5, state(5))


def test_signals_save_and_stop(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, save_policy=EverySteps(100) | OnSignal()) as manager:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.maybe_save(1, state(1))
        assert not manager.preempted
        assert not manager.maybe_save(2, state(2))
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.maybe_save(3, state(3))
        assert manager.preempted
    assert signal.getsignal(signal.SIGTERM) is before
    assert restored(tmp_path) == 3


def test_a_second_signal_goes_to_who_listened_before(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with CheckpointManager(tmp_path, save_policy=OnSignal()):
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_need_the_main_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="main thread"):
        pool.submit(CheckpointManager, tmp_path, save_policy=OnSignal()).result()


class ThreadSaver:
    """As little as a saver can be."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.gate = threading.Event()

    def save(self, state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **place: Any) -> Future[Any]:
        copy = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state_dict.items()}

        def run() -> Any:
            self.gate.wait()
            return save(copy, no_dist=True, **place)

        return self.pool.submit(run)


def test_saves_in_the_background_are_settled_when_they_end(tmp_path: Path) -> None:
    saver = ThreadSaver()
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1), saver=saver) as manager:
        futures = [manager.save(step, state(step)) for step in (1, 2, 3)]
        assert not (tmp_path / "latest").exists()
        assert manager.latest() is None
        assert steps(tmp_path) == {"step-1", "step-2", "step-3"}  # none of them is taken for debris
        saver.gate.set()
        manager.wait()
        assert all(future is not None and future.done() for future in futures)
        assert manager.latest() == 3
    assert names(tmp_path) == {"latest", "step-3"}
    assert restored(tmp_path) == 3


def test_waiting_for_a_saver_has_an_end(tmp_path: Path) -> None:
    saver = ThreadSaver()
    manager = CheckpointManager(tmp_path, saver=saver, close_seconds=0.1)
    future = manager.save(4, state(4))
    assert future is not None
    with pytest.raises(UnfinishedSaveError, match=r"rank 0, .*step 4 .* 0\.1 s \(close_seconds\)"):
        manager.close()
    with pytest.raises(UnfinishedSaveError, match=r"0\.2 s"):
        manager.wait(0.2)
    saver.gate.set()
    future.result()
    manager.close()
    assert manager.latest() == 4


def test_after_a_signal_waiting_ends_with_the_time_that_is_left(tmp_path: Path) -> None:
    saver, policy = ThreadSaver(), EverySteps(1) | OnSignal()
    manager = CheckpointManager(tmp_path, save_policy=policy, saver=saver, preemption_seconds=1.5, close_seconds=3600)
    save(state(1), checkpoint_id=tmp_path / "step-1")
    manager.maybe_save(2, state(2))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(UnfinishedSaveError, match=r"step 2 .*\(preemption_seconds\)"):
        manager.maybe_save(3, state(3))  # the one before holds it up
    assert manager.preempted
    with pytest.raises(UnfinishedSaveError, match=r"step 2 .*\(preemption_seconds\)"):
        manager.close()
    assert manager.latest() == 1
    saver.gate.set()
    manager.wait()
    assert manager.latest() == 2


class WaitingSaver(ThreadSaver):
    """Takes a save only when the one before has ended and been settled, like the policy `wait`."""

    last: Future[Any] | None = None

    def save(self, state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **place: Any) -> Future[Any]:
        if self.last is not None:
            self.gate.set()
            self.last.result()
            self.pool.submit(int).result()  # the only thread has come back from the manager's callback
            self.gate.clear()
        self.last = super().save(state_dict, process_group=process_group, no_dist=no_dist, **place)
        return self.last


def test_the_end_of_a_save_leaves_the_next_one_its_note(tmp_path: Path) -> None:
    saver = WaitingSaver()
    losses = {1: 5.0, 2: 1.0, 3: 3.0, 4: 4.0}
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1) | KeepBest(1, "loss"), saver=saver) as manager:
        for step, loss in losses.items():
            manager.save(step, state(step), metrics={"loss": loss})
        saver.gate.set()
        manager.wait()
        assert {record.step: dict(record.metrics) for record in manager.checkpoints()} == {
            2: {"loss": 1.0},
            4: {"loss": 4.0},
        }
    assert steps(tmp_path) == {"step-2", "step-4"}


def test_failures_in_the_background_are_raised_by_the_next_call(tmp_path: Path) -> None:
    saver = ThreadSaver()
    saver.gate.set()
    manager = CheckpointManager(tmp_path, saver=saver)
    future = manager.save(1, {"bad": object.__new__(type("Unpicklable", (), {"__reduce__": _refuse}))})
    assert future is not None
    assert future.exception() is not None
    assert manager._background.overdue(20, "", "") is None
    with pytest.raises(Exception, match="cannot travel"):
        manager.save(2, state(2))
    manager.save(3, state(3))
    manager.close()
    assert steps(tmp_path) == {"step-3"}


def _refuse(self: object) -> Any:
    raise TypeError("it cannot travel")


class FailingSaver:
    """Its saves end at once, some of them with a full disk."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.asked: list[int] = []

    def save(self, state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **place: Any) -> Future[Any]:
        step = int(place["checkpoint_id"].rpartition("-")[2])
        self.asked.append(step)
        done: Future[Any] = Future()
        if step in self.failing:
            done.set_exception(OSError(f"no room for step {step}"))
        else:
            done.set_result(None)
        return done


def test_failures_in_the_background_are_counted_when_they_have_ended(tmp_path: Path) -> None:
    saver = FailingSaver(1, 3, 4, 5)
    manager = CheckpointManager(tmp_path, saver=saver, tolerated_failures=2)
    assert all(manager.maybe_save(step, {}) for step in range(1, 6))
    with pytest.raises(OSError, match="step 5"):  # the third in a row
        manager.maybe_save(6, {})
    assert saver.asked == [1, 2, 3, 4, 5]
    assert manager.maybe_save(7, {})
    assert manager.maybe_save(8, {})
    manager.close()


@pytest.mark.parametrize("tolerated", [0, 3])
def test_the_last_save_begins_whatever_became_of_earlier_ones(
    tmp_path: Path, tolerated: int, caplog: pytest.LogCaptureFixture
) -> None:
    saver, policy = FailingSaver(10), EverySteps(10) | OnSignal()
    with CheckpointManager(tmp_path, save_policy=policy, saver=saver, tolerated_failures=tolerated) as manager:
        manager.maybe_save(10, {})
        os.kill(os.getpid(), signal.SIGTERM)
        if tolerated:
            assert manager.maybe_save(11, {})
            assert "saving step 10 failed, training goes on (failure 1)" in caplog.text
        else:
            with pytest.raises(OSError, match="step 10"):
                manager.maybe_save(11, {})
        assert manager.preempted
        assert saver.asked == [10, 11]


def test_each_failure_in_the_background_is_raised_once(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, saver=ThreadSaver())
    gate = manager._saver.gate  # type: ignore[union-attr]
    for step in (1, 2):
        manager.save(step, {"bad": object.__new__(type("Unpicklable", (), {"__reduce__": _refuse}))})
    gate.set()
    for _ in range(2):
        with pytest.raises(Exception, match="cannot travel"):
            manager.wait()
    manager.close()


def test_observers_hear_what_is_removed(tmp_path: Path) -> None:
    heard: list[str] = []

    class Observer:
        @hookimpl
        def dcp_on_event(self, event: CheckpointEvent) -> None:
            if event.operation == "manage":
                heard.append(f"{event.phase} {event.checkpoint_id}")

    plugins.register(Observer(), name="observer")
    try:
        with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
            for step in (1, 2):
                manager.save(step, state(step))
    finally:
        plugins.unregister("observer")
    assert heard == [f"remove {tmp_path}/step-1"]


# On ranks.


def sharded(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(1000.0).reshape(100, 10) + value
    return {"weight": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None), "step": int(value)}


def save_steps(root: str, wanted: list[int], **options: Any) -> list[int]:
    with CheckpointManager(root, **options) as manager:
        return [step for step in wanted if manager.maybe_save(step, sharded(step))]


def resume(root: str) -> tuple[int | None, bool]:
    template = sharded(-5)
    with CheckpointManager(root) as manager:
        found = manager.restore(template)
    if found is None:
        return None, True
    return found.step, torch.equal(template["weight"].to_local(), sharded(found.step)["weight"].to_local())


def test_ranks_resume_on_any_world_size(ranks: Any, tmp_path: Path) -> None:
    root = str(tmp_path)
    assert ranks.run(2, resume, root) == [(None, True)] * 2
    assert ranks.run(2, save_steps, root, [1, 2, 3]) == [[1, 2, 3]] * 2
    for world_size in (1, 2, 4):
        assert ranks.run(world_size, resume, root) == [(3, True)] * world_size
    damage_any(tmp_path / "step-3")
    assert ranks.run(4, resume, root) == [(2, True)] * 4
    assert ranks.run(2, resume, root) == [(2, True)] * 2


def damage_any(folder: Path) -> None:
    data = max(folder.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


class Unmounted(FileSystemReader):
    """Sees an empty folder on the last rank."""

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        there = dist.get_rank() < dist.get_world_size() - 1
        return super()._open(checkpoint_id if there else str(checkpoint_id).replace("step-", "nothing-"))


def resume_unmounted(root: str) -> str:
    with CheckpointManager(root, reader=Unmounted) as manager:
        try:
            found = manager.restore(sharded(-5))
        except CheckpointNotFoundError as error:
            return str(error)
    return "restored" if found is None else f"restored {found.step}"


def test_what_one_rank_does_not_see_is_no_damage(ranks: Any, tmp_path: Path) -> None:
    root = str(tmp_path)
    ranks.run(2, save_steps, root, [1, 2])
    for told in ranks.run(2, resume_unmounted, root, timeout=60):
        assert "step 2 is there for the coordinator" in told
        assert "rank 1: " in told
        assert "nothing is put aside" in told
    assert not list(tmp_path.glob("*/.dcp-quarantined.json"))
    assert ranks.run(2, resume, root) == [(2, True)] * 2


def on_one_rank(root: str, act: Callable[[CheckpointManager], None], policy: Any) -> list[int]:
    with CheckpointManager(root, save_policy=policy) as manager:
        saved = []
        for step in range(1, 6):
            if step == 3 and dist.get_rank() == 1:
                act(manager)
            if manager.maybe_save(step, sharded(step)):
                saved.append(step)
            if manager.preempted:
                break
        return saved


@pytest.mark.parametrize(
    ("act", "policy"),
    [
        (lambda manager: manager.request_save(), OnRequest()),
        (lambda manager: os.kill(os.getpid(), signal.SIGTERM), EverySteps(50) | OnSignal()),
    ],
    ids=["request", "SIGTERM"],
)
def test_what_one_rank_hears_all_do(ranks: Any, tmp_path: Path, act: Any, policy: Any) -> None:
    assert ranks.run(2, on_one_rank, str(tmp_path), act, policy) == [[3], [3]]


def one_rank_fails(root: str) -> list[str]:
    with CheckpointManager(root, tolerated_failures=1) as manager:
        bad = {"own": Failing(OSError("its disk is gone"))} if dist.get_rank() == 1 else {}
        told = [str(manager.maybe_save(1, {**sharded(1), **bad}))]
        try:
            manager.maybe_save(2, {**sharded(2), **bad})
        except CheckpointException as error:
            told.append(str([*error.failures]))
        told.append(str(manager.maybe_save(3, sharded(3))))
    return told


def test_one_ranks_failure_is_everybodys(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, one_rank_fails, str(tmp_path)) == [["False", "[1]", "True"]] * 2
    assert steps(tmp_path) == {"step-3"}


class OneRankFailsSaver:
    """Its futures fail on the last rank only; the others' succeed."""

    def save(self, state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **place: Any) -> Future[Any]:
        done: Future[Any] = Future()
        if dist.get_rank() == dist.get_world_size() - 1:
            error: Exception = OSError("its disk is full") if state_dict["full"] else RuntimeError("a bug")
            done.set_exception(error)
        else:
            done.set_result(None)
        return done


def tell_one_by_one(root: str, full: bool, tolerated: int) -> list[str]:
    manager = CheckpointManager(root, saver=OneRankFailsSaver(), tolerated_failures=tolerated)
    told = []
    for step in range(1, 5):
        try:
            told.append(str(manager.maybe_save(step, {"full": full})))
        except CheckpointException as error:
            told.append(f"failed on {[*error.failures]}: {error}".splitlines()[0])
    return told


@pytest.mark.parametrize(
    ("full", "tolerated", "told"),
    [
        (True, 9, [True, True, True, True]),
        (True, 1, [True, True, 2, True]),
        (True, 0, [True, 1, True, 3]),
        (False, 9, [True, 1, True, 3]),
    ],
    ids=["tolerated", "tolerated once", "not tolerated", "a bug"],
)
def test_all_ranks_tolerate_the_same(ranks: Any, tmp_path: Path, full: bool, tolerated: int, told: list[Any]) -> None:
    first, second = ranks.run(2, tell_one_by_one, str(tmp_path), full, tolerated, timeout=60)
    assert first == second
    what = "failed on [1]: the save of step {} in the background failed (failed on rank 1)"
    assert first == ["True" if step is True else what.format(step) for step in told]


def state_fails_on_one_rank(root: str) -> str:
    def broken() -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("no state today")
        return sharded(1)

    with CheckpointManager(root) as manager:
        try:
            manager.save(1, broken)
        except CheckpointException as error:
            return str(error)
    return "saved"


def test_a_state_that_fails_on_one_rank_fails_on_all(ranks: Any, tmp_path: Path) -> None:
    for told in ranks.run(2, state_fails_on_one_rank, str(tmp_path), timeout=30):
        assert "rank 1" in told
        assert "no state today" in told
    assert steps(tmp_path) == set()

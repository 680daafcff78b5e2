"""A manager whose root is several tiers: promotes in a process of its own, restores from the nearest undamaged copy."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_async import AsyncSaver
from dcp_io import STALE_AFTER_SECONDS, KeepLast, KeepPolicy, open_store
from dcp_io.saves.save_session import SaveSession
from dcp_manager import CheckpointManager
from dcp_tiers import Tier, Tiers
from dcp_tiers.copying import copy_checkpoint
from dcp_tiers.promote import promote
from integration_tests.hosts.pretended import hangs_below, unwritable_below, without_promoter
from integration_tests.kits.damage import lose


def _run(tmp_path: Path) -> Tiers:
    tiers = Tiers([Tier(tmp_path / "near", keep=KeepLast(1)), Tier(tmp_path / "far", keep=KeepLast(2))])
    with CheckpointManager(tiers, no_dist=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"weight": torch.full((64,), step)})
    return tiers


def _restore(tiers: Tiers) -> tuple[int, int]:
    state = {"weight": torch.zeros(64, dtype=torch.int64)}
    manager = CheckpointManager(tiers, no_dist=True)
    try:
        restored = manager.restore(state)
    finally:
        manager.close()
    assert restored is not None
    return restored.step, int(state["weight"][-1])


def test_a_manager_promotes_and_restores_over_tiers(tmp_path: Path) -> None:
    tiers = _run(tmp_path)
    far = {step.step for step in tiers.steps() if 1 in step.complete_in}
    assert {2, 3} <= far
    assert (tmp_path / "near/run.tiers.toml").read_bytes() == (tmp_path / "far/run.tiers.toml").read_bytes()
    assert _restore(tiers) == (3, 3)

    data = next((tmp_path / "near/step-3").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] if data.stat().st_size else b"")
    assert _restore(tiers) == (3, 3)  # the copy in the far tier
    lose(tmp_path / "near")
    assert _restore(tiers) == (3, 3)
    assert tiers.drain(timeout_seconds=120) == {}


def _state(step: int) -> dict[str, Any]:
    """A value that differs from rank to rank, and one that does not."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {f"own {rank}": torch.full((1000,), step), "weight": torch.full((4096,), step), "step": step}


def _steps(root: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in root.glob("step-*/.metadata"))


def _train(root: str, kind: str | None, wanted: list[int], options: dict[str, Any]) -> list[int]:
    """Save steps; returns what the slow tier lacks at the end, on the first rank."""
    tiers = Tiers([Tier(f"{root}/near", **options), Tier(f"{root}/far")])
    if kind is None:
        with CheckpointManager(tiers) as manager:
            for step in wanted:
                manager.save(step, _state(step))
        return _left(tiers)
    with AsyncSaver(kind) as saver, CheckpointManager(tiers, saver=saver) as manager:
        for step in wanted:
            manager.save(step, _state(step))
            manager.wait()
    return _left(tiers)


def _left(tiers: Tiers) -> list[int]:
    return [step for steps in tiers.drain(0.0).values() for step in steps] if dist.get_rank() == 0 else []


def _resume(root: str) -> tuple[int, bool]:
    tiers = Tiers([Tier(f"{root}/near"), Tier(f"{root}/far")])
    state = {key: value * 0 for key, value in _state(1).items()}
    with CheckpointManager(tiers) as manager:
        restored = manager.restore(state)
    assert restored is not None
    expected = _state(restored.step)
    return restored.step, all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(expected[key])) for key in state)


@pytest.mark.parametrize("kind", [None, "thread", "process"])
def test_two_ranks_save_promote_and_resume(kind: str | None, ranks: Any, tmp_path: Path) -> None:
    root = str(tmp_path)
    assert ranks.run(2, _train, root, kind, [1, 2, 3], {"keep": KeepLast(1)}) == [[], []]
    assert _steps(tmp_path / "far") == [1, 2, 3]
    assert ranks.run(2, _resume, root) == [(3, True)] * 2
    lose(tmp_path / "near")
    assert ranks.run(2, _resume, root) == [(3, True)] * 2


def test_two_ranks_wait_together_for_room(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, _train, str(tmp_path), None, [1, 2, 3, 4, 5], {"max_bytes": 130_000}) == [[], []]
    assert _steps(tmp_path / "far") == [1, 2, 3, 4, 5]
    assert len(_steps(tmp_path / "near")) < 5


def _resume_over_half_a_copy(root: str) -> tuple[int, list[tuple[int, str, bool]]]:
    state = _state(1)
    with CheckpointManager(Tiers([Tier(f"{root}/near"), Tier(f"{root}/far")])) as manager:
        restored = manager.restore(state)
    assert restored is not None
    return restored.step, [(one.step, one.text, one.is_running) for one in restored.unfinished]


def _save_near(root: str, step: int) -> None:
    with CheckpointManager(f"{root}/near") as manager:
        manager.save(step, _state(step))


def _save_and_promote(root: str, steps: list[int]) -> None:
    """Save steps; no promoter is at work afterwards, as there is after a drain."""
    with CheckpointManager(Tiers([Tier(f"{root}/near"), Tier(f"{root}/far")])) as manager:
        for step in steps:
            manager.save(step, _state(step))


class _CutOffError(Exception):
    """The promoter loses its storage."""


def _promote_a_part(root: Path, step: int) -> None:
    """Promote a step until its first file is there."""

    def end_after_a_file(_: int) -> None:
        if [*root.glob(f"far/step-{step}/.dcp-promoting.json")]:
            raise _CutOffError

    source, target = (open_store(root / tier / f"step-{step}") for tier in ("near", "far"))
    with pytest.raises(_CutOffError):
        copy_checkpoint(source, target, stale_after_seconds=STALE_AFTER_SECONDS, pace=end_after_a_file)


def test_a_restore_says_what_is_unfinished(ranks: Any, tmp_path: Path) -> None:
    root = str(tmp_path)
    ranks.run(2, _save_and_promote, root, [1, 2])
    assert _steps(tmp_path / "far") == [1, 2]
    ranks.run(2, _save_near, root, 3)
    _promote_a_part(tmp_path, 3)
    lose(tmp_path / "near")  # the host was replaced
    Tiers([Tier(tmp_path / "near"), Tier(tmp_path / "far")]).write()
    killed = tmp_path / "near/step-4"
    killed.mkdir()
    (killed / "__0_0.abc.distcp").write_bytes(b"x" * 2000)
    found = ranks.run(2, _resume_over_half_a_copy, root)
    assert found[0] == found[1]  # on all ranks
    step, unfinished = found[0]
    assert (step, [(one[0], one[2]) for one in unfinished]) == (2, [(4, False), (3, False)])
    near, far = (text for _, text, _ in unfinished)
    assert near == f"{killed} has 1 data file with 1.95 KiB, and no index: its save was interrupted"
    assert f"{tmp_path}/far/step-3 has " in far
    assert f"and no index: a copy from {tmp_path}/near/step-3 on " in far
    assert "was interrupted" in far
    # Where nothing is passed over, nothing is said.
    ranks.run(2, _train, root, None, [5], {})
    assert ranks.run(2, _resume_over_half_a_copy, root) == [(5, [])] * 2


def test_a_save_that_runs_is_no_reason_to_worry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = _run(tmp_path)
    store = open_store(tiers.step(4))
    session = SaveSession.begin(store)
    (tmp_path / "near/step-4" / f"__0_0.{session.save_id}.distcp").write_bytes(b"x" * 2000)
    state = {"weight": torch.zeros(64, dtype=torch.int64)}
    manager = CheckpointManager(tiers, no_dist=True)
    caplog.clear()
    restored = manager.restore(state)
    session.abort()
    manager.close()
    assert restored is not None
    (unfinished,) = restored.unfinished
    assert (restored.step, unfinished.step, unfinished.is_running) == (3, 4, True)
    assert "is at work" in unfinished.text
    assert not [record for record in caplog.records if "step 4" in record.getMessage() and record.levelname != "INFO"]


def test_a_slow_tier_that_hangs_does_not_stop_a_restore(tmp_path: Path) -> None:
    tiers = _run(tmp_path)
    with hangs_below(tmp_path / "far"):
        assert tiers.latest() == 3
        assert dcp.latest_valid(tiers).step == 3  # type: ignore[union-attr]
        assert _restore(tiers) == (3, 3)
    assert tiers.drain(timeout_seconds=60) == {}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_slow_tier_that_cannot_be_written(tmp_path: Path, number: int) -> None:
    tiers = Tiers([Tier(tmp_path / "near", keep=KeepLast(1)), Tier(tmp_path / "far", keep=KeepLast(2))])
    far = str(tmp_path / "far")
    with without_promoter(), CheckpointManager(tiers, no_dist=True) as manager:
        manager.save(1, {"weight": torch.full((64,), 1)})
        assert promote(tiers) == {}
        with unwritable_below(far, number):
            for step in (2, 3):
                manager.save(step, {"weight": torch.full((64,), step)})
                assert promote(tiers, progress_timeout_seconds=0.1) == {far: [*range(2, step + 1)]}
        assert tiers.steps()[0].complete_in == (1,)
        assert promote(tiers) == {}
    assert _steps(tmp_path / "far") == [2, 3]
    lose(tmp_path / "near")
    with unwritable_below(far, number):
        assert _restore(tiers) == (3, 3)


def test_clocks_that_jump(tmp_path: Path) -> None:
    tiers = Tiers([Tier(tmp_path / "near", keep=KeepLast(1)), Tier(tmp_path / "far", keep=KeepLast(2))])
    now, day = time.time(), 86400.0
    for step, jump in enumerate((0.0, day, -2 * day, 5.0, -400 * day, 3 * day), 1):
        with (
            mock.patch.object(time, "time", lambda jump=jump: now + jump),
            without_promoter(),
            CheckpointManager(tiers, no_dist=True) as manager,  # as after a restart
        ):
            manager.save(step, {"weight": torch.full((64,), step)})
            assert tiers.latest() == step
            assert promote(tiers) == {}
        assert _steps(tmp_path / "near") == [step]
        assert _steps(tmp_path / "far") == [*range(max(1, step - 1), step + 1)]
    assert _restore(tiers) == (6, 6)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_async_save_ends_when_the_fast_tier_has_it(kind: str, tmp_path: Path) -> None:
    (tmp_path / "far").write_text("the slow tier is away")
    tiers = Tiers([Tier(tmp_path / "near"), Tier(tmp_path / "far")])
    with AsyncSaver(kind) as saver:
        manager = CheckpointManager(tiers, no_dist=True, saver=saver)
        state = {"weight": torch.zeros(1000)}
        for step in (1, 2, 3):  # each stages into the buffer that the one before has left
            state["weight"].fill_(step)
            future = manager.save(step, state)
            assert future is not None
            future.result(timeout=250)
            manager.wait()
        assert tiers.drain(0.0) == {str(tmp_path / "far"): [1, 2, 3]}
        (tmp_path / "far").unlink()
        manager.close()
    assert tiers.drain(60) == {}
    assert _weights(tmp_path / "far") == {1: 1.0, 2: 2.0, 3: 3.0}


def _weights(root: Path) -> dict[int, float]:
    found = {}
    for step in _steps(root):
        state = {"weight": torch.zeros(1000)}
        manager = CheckpointManager(root, no_dist=True)
        manager.restore(state, step=step)
        found[step] = float(state["weight"].mean())
    return found


TRAINER = """
import time
import torch
import dcp_all as dcp

tiers = dcp.Tiers([dcp.Tier("near"), dcp.Tier("far", rate_bytes_per_second=RATE)])
policy = dcp.EverySteps(1000) | dcp.OnSignal()
state = {"weight": torch.zeros(1 << 18), "step": 0}
with dcp.CheckpointManager(tiers, save_policy=policy, preemption_timeout_seconds=LIMIT) as manager:
    print("training", flush=True)
    for step in range(1, 100_000):
        time.sleep(0.01)
        state["weight"].fill_(step)
        state["step"] = step
        manager.maybe_save(step, state)
        if manager.preempted:
            print(step, flush=True)
            break
"""


@pytest.mark.parametrize(("rate", "limit", "arrives"), [(1e9, 200, True), (1e3, 8, False)])  # 1 MiB: 17 minutes
def test_preemption_promotes_as_far_as_it_goes(rate: float, limit: int, arrives: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAINER.replace("RATE", str(rate)).replace("LIMIT", str(limit))]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGTERM)
        step = int(process.stdout.readline())
        assert process.wait(timeout=240) == 0  # what does not arrive would take longer
    assert (_steps(tmp_path / "far") == [step]) is arrives
    tiers = Tiers.read(tmp_path / "near")
    _kill_promoter(tmp_path / "near")  # the scheduler's SIGKILL, for all processes of the job
    started = Tiers([tiers.tiers[0], Tier(tmp_path / "far")])
    manager = CheckpointManager(started, no_dist=True)  # whoever starts next
    manager.close()
    assert started.drain(60) == {}
    assert _steps(tmp_path / "far") == [step]


def _kill_promoter(near: Path) -> None:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"dcp_tiers.promote" in words and str(near).encode() in words:
            os.kill(int(folder.name), signal.SIGKILL)


@pytest.mark.parametrize("keep_policy", [None, dcp.KeepLast(2)])
def test_a_run_that_has_ended_leaves_in_the_first_tier_what_its_policy_keeps(
    tmp_path: Path, keep_policy: KeepPolicy | None
) -> None:
    """The last promotion comes after the last save, in which retention would otherwise be applied."""
    near = Tier(tmp_path / "near", keep=dcp.KeepAll() if keep_policy else dcp.KeepLast(2))
    tiers = Tiers([near, Tier(tmp_path / "far")])
    with CheckpointManager(tiers, keep_policy=keep_policy, no_dist=True) as manager:
        for step in range(1, 6):
            manager.save(step, {"w": torch.ones(3)})
    assert sorted(path.name for path in (tmp_path / "near").glob("step-*")) == ["step-4", "step-5"]
    assert len([*(tmp_path / "far").glob("step-*")]) == 5


def test_a_step_that_is_saved_again_where_the_clock_is_behind_is_promoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job moved to another host; promotion took the save for an earlier one than that in the slow tier."""
    tiers = Tiers([Tier(tmp_path / "near"), Tier(tmp_path / "far")])
    dcp.save({"value": 1}, checkpoint_id=tiers.step(1), no_dist=True)
    assert promote(tiers) == {}
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)
    dcp.save({"value": 2}, checkpoint_id=tiers.step(1), no_dist=True)
    assert promote(tiers) == {}
    assert dcp.load_keys(checkpoint_id=tmp_path / "far/step-1", no_dist=True)["value"] == 2

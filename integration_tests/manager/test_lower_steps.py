"""Training that saves lower steps than its root holds; and that library, command and manager agree on the newest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dcp_all as dcp
from dcp_core import CheckpointException
from dcp_inspect import run
from dcp_manager import CheckpointManager, KeepLast
from integration_tests.manager.checkpoints import restored, state, steps


def saved(root: Path, *numbers: int, **options: Any) -> None:
    with CheckpointManager(root, **options) as manager:
        for step in numbers:
            manager.save(step, state(step))


def test_training_that_began_again_is_warned_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 4, 8, keep_policy=KeepLast(3))
    with CheckpointManager(tmp_path, keep_policy=KeepLast(3)) as manager:
        assert manager.restore(state()) is not None
        assert not caplog.records
        for step in (1, 2, 3, 5):
            manager.save(step, state(step))
            assert f"step {step} is lower than step 8" in caplog.records[-1].getMessage()
        assert manager.latest() == 8
    assert steps(tmp_path) == {"step-2", "step-3", "step-5", "step-8"}
    assert restored(tmp_path) == 8


def test_lower_steps_can_be_refused(tmp_path: Path) -> None:
    saved(tmp_path, 4, 8)
    with CheckpointManager(tmp_path, lower_steps="raise", tolerated_failures=9) as manager:
        for step in (5, 4):
            with pytest.raises(ValueError, match=f"step {step} is lower than step 8"):
                manager.maybe_save(step, state(-step))
        manager.save(9, state(9))
    assert steps(tmp_path) == {"step-4", "step-8", "step-9"}
    assert restored(tmp_path, step=4) == 4


def test_lower_steps_can_be_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 4, 8)
    saved(tmp_path, 5, 6, keep_policy=KeepLast(2), lower_steps="allow")
    assert not caplog.records
    assert steps(tmp_path) == {"step-5", "step-6"}


def test_going_back_on_purpose_is_warned_of_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 4, 8)
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
        assert manager.restore(state(), step=4) is not None
        manager.save(5, state(5))
    assert "step 5 is lower than step 8" in caplog.text
    assert steps(tmp_path) == {"step-5"}


def _refused(root: str) -> bool:
    manager = CheckpointManager(root, lower_steps="raise")
    manager.save(8, {"step": 8})
    try:
        manager.save(5, {"step": 5})
    except CheckpointException as error:
        return "ValueError" in str(error)
    return False


def test_all_ranks_are_refused(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, _refused, str(tmp_path)) == [True, True]
    assert steps(tmp_path) == {"step-8"}


TIMES = st.lists(st.integers(1, 10**9), min_size=4, max_size=4)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TIMES, st.sets(st.sampled_from([1, 9, 10, 200])))
def test_library_command_and_manager_agree_whatever_the_times_of_files(
    four: Path, capsys: pytest.CaptureFixture[str], times: list[int], put_aside: set[int]
) -> None:
    good = []
    for step, mtime in zip((1, 9, 10, 200), times, strict=True):
        folder, sign = four / f"step-{step}", four / f"step-{step}" / ".dcp-quarantined.json"
        os.utime(folder / ".metadata", (mtime, mtime))
        sign.unlink(missing_ok=True)
        if step in put_aside:
            sign.write_text("{}")
        else:
            good.append(step)
    newest = max(good, default=None)
    found = dcp.latest_valid(four)
    assert (None if found is None else found.step) == newest
    manager = CheckpointManager(four, no_dist=True)
    assert manager.latest() == newest
    capsys.readouterr()
    assert run(["ls", str(four), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in listed] == [200, 10, 9, 1]
    assert [each["step"] for each in listed if each["complete"]] == sorted(good, reverse=True)
    assert run(["prune", str(four), "--keep", "1", "--dry-run", "--json"]) == 0
    pruned = json.loads(capsys.readouterr().out)
    assert pruned["kept"] == ([] if newest is None else [str(four / f"step-{newest}")])
    assert len(pruned["checkpoints"]) == max(0, len(good) - 1)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("four")
    saved(root, 1, 9, 10, 200, no_dist=True)
    return root

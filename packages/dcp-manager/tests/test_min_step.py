"""`restore` refuses a step that is too low, and waits for a higher one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dcp_core import CheckpointNotFoundError
from dcp_manager import CheckpointManager


def save(root: Path, step: int) -> None:
    with CheckpointManager(root, no_dist=True) as manager:
        manager.save(step, {"step": step})


def test_a_lower_step_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 3)
    state = {"step": 0}
    with CheckpointManager(tmp_path, no_dist=True) as manager:
        with pytest.raises(CheckpointNotFoundError, match=r"min_step is 4, and .* newest complete one is of step 3"):
            manager.restore(state, min_step=4)
        assert state == {"step": 0}
        restored = manager.restore(state, min_step=3)
    assert restored is not None
    assert state == {"step": 3}


def test_without_a_checkpoint_a_lowest_step_is_refused_too(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, no_dist=True) as manager:
        assert manager.restore({}) is None
        with pytest.raises(CheckpointNotFoundError, match="min_step is 1, and of the checkpoints there is none"):
            manager.restore({}, min_step=1)


def test_a_restore_waits_for_a_step(tmp_path: Path) -> None:
    save(tmp_path, 3)
    later = threading.Timer(0.5, save, [tmp_path, 5])
    later.start()
    state = {"step": 0}
    with CheckpointManager(tmp_path, no_dist=True) as manager:
        restored = manager.restore(state, min_step=5, hosts_timeout_seconds=30)
    later.join()
    assert restored is not None
    assert (restored.step, state) == (5, {"step": 5})

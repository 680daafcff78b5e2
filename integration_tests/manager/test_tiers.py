"""A manager whose root is several tiers: promotes in a process of its own, restores from the nearest undamaged copy."""

import shutil
from pathlib import Path

import torch

from dcp_io import KeepLast
from dcp_manager import CheckpointManager
from dcp_tiers import Tier, Tiers


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
    shutil.rmtree(tmp_path / "near")
    assert _restore(tiers) == (3, 3)
    assert tiers.drain(seconds=120) == {}

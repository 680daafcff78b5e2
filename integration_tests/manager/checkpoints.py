"""What the tests of the manager save, break and look for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dcp_manager import CheckpointManager


def state(value: float = 0.0) -> dict[str, Any]:
    return {"weight": torch.full((10_000,), float(value)), "step": int(value)}


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def steps(root: Path) -> set[str]:
    return names(root) - {"latest"}


def restored(root: Path | str, step: int | None = None, **options: Any) -> float | None:
    template = state(-1)
    with CheckpointManager(root, **options) as manager:
        found = manager.restore(template, step=step)
    if found is None:
        return None
    assert found.step == template["step"] == float(template["weight"][0])
    return found.step


class Failing:
    """Raises while it is saved."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        raise self.error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("what failed to save is not loaded")

"""What ranks do in the resume tests: train and save, or load and train on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from dcp_core import PerRank, load, save
from dcp_state import RandomState, app_state
from integration_tests.state.nets import Run, build

__all__ = ["STEPS", "resume", "stock_modules", "train_and_save"]

STEPS = 2
"""Before the save, and again after it."""


def _app(run: Run, scheduler: Any, step: int) -> Any:
    return app_state(run.parts, run.optimizer, scheduler=scheduler, step=step, random=PerRank(RandomState()))


def _train(run: Run, scheduler: Any, start: int) -> list[float]:
    losses = []
    for number in range(start, start + STEPS):
        losses.append(run.step(number))
        scheduler.step()
    return losses


def train_and_save(kind: str, variant: str, folder: str, dtype: torch.dtype = torch.float32) -> list[float]:
    """Train, save, train on; the later losses."""
    run = build(kind, variant, dtype=dtype)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.9)
    _train(run, scheduler, 0)
    save({"app": _app(run, scheduler, STEPS)}, checkpoint_id=folder)
    return _train(run, scheduler, STEPS)


def resume(
    kind: str, variant: str, folder: str, again: str, dtype: torch.dtype = torch.float32
) -> tuple[list[float], Mapping[str, str], int]:
    """Load into a run that began otherwise, save that as `again`, train on.

    Returns:
        The losses, what was initialised instead of restored, and the step.
    """
    run = build(kind, variant, seed=1, dtype=dtype)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.9)
    app = _app(run, scheduler, 0)
    load({"app": app}, checkpoint_id=folder)
    save({"app": _app(run, scheduler, app["step"])}, checkpoint_id=again)
    return _train(run, scheduler, app["step"]), app.report.initialised, app["step"]


def stock_modules() -> list[str]:
    """The modules of stock that are imported."""
    return [name for name in sys.modules if name.startswith("torch.distributed.checkpoint")]

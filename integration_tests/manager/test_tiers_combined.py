"""Tiers with each saver, each kind of fast tier, and compressed checkpoints: all combinations promote and restore."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp
from dcp_core.plugins import open_writer
from integration_tests.kits.damage import lose

STEPS = (1, 2, 3)


def state(step: int) -> dict[str, Any]:
    """Values of several kinds, of which those of a model shrink."""
    torch.manual_seed(step)
    return {"model": torch.randn(300_000).bfloat16() * 0.02, "ids": torch.arange(10_000) + step, "step": step}


def restored(root: dcp.Tiers) -> tuple[int, bool]:
    template = {key: value * 0 for key, value in state(1).items()}
    with dcp.CheckpointManager(root, no_dist=True) as manager:
        found = manager.restore(template)
    assert found is not None
    wanted = state(found.step)
    return found.step, all(torch.equal(torch.as_tensor(template[key]), torch.as_tensor(wanted[key])) for key in wanted)


def combinations() -> list[Any]:
    """All combinations; those gate in which each pair of choices occurs."""
    kinds, compressions = (None, "thread", "process"), (None, "auto", "zstd")
    return [
        pytest.param(
            kind,
            per_host,
            compression,
            marks=() if (kinds.index(kind) + per_host + compressions.index(compression)) % 2 else pytest.mark.slow,
        )
        for kind, per_host, compression in itertools.product(kinds, (False, True), compressions)
    ]


@pytest.mark.parametrize(("kind", "per_host", "compression"), combinations())
def test_all_combinations(tmp_path: Path, kind: str | None, per_host: bool, compression: str | None) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = dcp.Tiers([dcp.Tier(near, keep=dcp.KeepLast(1), per_host=per_host), dcp.Tier(far, keep=dcp.KeepLast(2))])
    writer = None if compression is None else partial(open_writer, compression=compression)
    with ExitStack() as stack:
        saver = None if kind is None else stack.enter_context(dcp.AsyncSaver(kind))
        manager = stack.enter_context(dcp.CheckpointManager(tiers, no_dist=True, saver=saver, writer=writer))
        for step in STEPS:
            manager.save(step, state(step))
    assert tiers.drain(60) == {}
    assert {path.name for path in far.glob("step-*")} == {"step-2", "step-3"}
    size = sum(path.stat().st_size for path in (far / "step-3").glob("*.distcp"))
    assert (size < 600_000) is (compression is not None)
    assert dcp.verify_checkpoint(far / "step-3").ok
    assert restored(tiers) == (3, True)
    lose(near)
    assert restored(tiers) == (3, True)

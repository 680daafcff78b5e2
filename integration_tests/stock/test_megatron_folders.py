"""Folders as Megatron-Core's `torch_dist`, NVRx, slime and verl lay them out: read by every call and command."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_all as dcp
from dcp_io import LocalStore, verify_checkpoint


class MegatronPlanner(stock.DefaultSavePlanner):
    """Adds what versions of Megatron-Core add to the index: plans of all ranks, and data of their own."""

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.all_local_plans = all_plans
        metadata.mcore_data = {"decoder.weight": {"nd_reformulated_orig_global_shape": (4, 2)}}
        return plans, metadata


# Program → folder of a checkpoint below the run, and the files around it.
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Megatron-Core": ("iter_0000100", ("latest_checkpointed_iteration.txt",)),
    "slime": ("iter_0000100", ("latest_checkpointed_iteration.txt", "rollout/global_dataset_state_dict_100.pt")),
    "verl": (
        "global_step_100/actor/dist_ckpt",
        (
            "latest_checkpointed_iteration.txt",
            "global_step_100/data.pt",
            "global_step_100/actor/huggingface/config.json",
        ),
    ),
    "NVRx": ("step_100", ()),
}


@pytest.fixture(params=LAYOUTS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint at step 100, with the files that lie beside the index and around the folder."""
    name, around = LAYOUTS[request.param]
    folder = tmp_path / "run" / name
    state = {"decoder.weight": torch.arange(8.0).reshape(4, 2), "rng/shard_0_1": {"seed": 3}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(state, checkpoint_id=folder, planner=MegatronPlanner(flatten_state_dict=False))
    if request.param != "NVRx":
        torch.save({"iteration": 100, "checkpoint_version": 3.0}, folder / "common.pt")
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    for path in around:
        other = tmp_path / "run" / path
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("100")
    return folder


def test_it_loads_verifies_and_converts(folder: Path, tmp_path: Path) -> None:
    template = {"decoder.weight": torch.zeros(4, 2)}
    dcp.load(template, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
    assert torch.equal(template["decoder.weight"], torch.arange(8.0).reshape(4, 2))
    assert dcp.load_keys(checkpoint_id=folder)["rng/shard_0_1"] == {"seed": 3}
    assert verify_checkpoint(LocalStore(folder)).problems == ()
    dcp.convert(folder, tmp_path / "model.safetensors", include=["decoder.*"])
    found = dcp.latest_valid(folder.parent)
    assert found is not None
    assert found.place.step == (None if folder.name == "dist_ckpt" else 100)


def test_it_is_removed_without_its_neighbours(folder: Path) -> None:
    others = [path for path in folder.iterdir() if path.suffix in (".pt", ".json")]
    done = subprocess.run(
        [sys.executable, "-m", "dcp_inspect", "rm", "--yes", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / ".metadata").exists()
    assert not [*folder.glob("*.distcp")]
    assert all(path.exists() for path in others)


def test_commands_know_it(folder: Path) -> None:
    for arguments in (["ls", folder.parent], ["show", folder], ["verify", folder]):
        command = [sys.executable, "-m", "dcp_inspect", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        assert folder.name in done.stdout or "decoder.weight" in done.stdout

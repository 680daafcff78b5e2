"""Whole safetensors files that all ranks write together, from both asynchronous savers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import dcp_all as dcp


@pytest.mark.parametrize("kind", [pytest.param("thread", marks=pytest.mark.slow), "process"])
def test_a_background_save_writes_whole_files(ranks: Any, tmp_path: Path, kind: str) -> None:
    def run(folder: str, kind: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (2,))
        with dcp.AsyncSaver(kind) as saver:
            for version in range(2):
                whole = torch.arange(24.0).view(4, 6) + version
                local = whole.chunk(2, 1)[dist.get_rank()].contiguous()
                columns = DTensor.from_local(local, mesh, [Shard(1)], shape=whole.shape, stride=whole.stride())
                writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
                future = saver.save({"w": columns, "b": torch.full((3,), version)}, storage_writer=writer)
                local.fill_(-1)  # training goes on
                future.result()

    ranks.run(2, run, str(tmp_path), kind)
    (file,) = tmp_path.glob("*.safetensors")
    found = load_file(file)
    assert torch.equal(found["w"], torch.arange(24.0).view(4, 6) + 1)
    assert torch.equal(found["b"], torch.full((3,), 1))
    assert {*os.listdir(tmp_path)} == {file.name, "model.safetensors.index.json"}

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
from dcp_core.errors import UnsupportedValueError
from dcp_core.testing.trees import same


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


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_background_export_has_all_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Relative paths mean the folder in which the writer was made, wherever training goes meanwhile."""
    (tmp_path / "base").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    tied = torch.zeros(3)
    with dcp.AsyncSaver(kind) as saver:
        for version in range(2):
            monkeypatch.chdir(tmp_path)
            tied.fill_(version)
            state = {"net": {"a": tied, "b": tied, "stack": torch.arange(6.0).view(3, 2) + version}}
            writer = dcp.SafetensorsWriter(
                "out", dtype=torch.float16, rename={"net": ""}, split={"stack": "stack.{}"}, config_from="base"
            )
            future = saver.save(state, storage_writer=writer, no_dist=True)
            monkeypatch.chdir(tmp_path / "elsewhere")
            tied.fill_(-1)  # training goes on
            future.result()
    assert {*os.listdir(tmp_path / "out")} == {"model.safetensors", "config.json"}
    found = load_file(tmp_path / "out" / "model.safetensors")
    slices = {f"stack.{n}": torch.tensor([2.0 * n + 1, 2.0 * n + 2]) for n in range(3)}
    assert same(found, {name: each.half() for name, each in {"a": torch.ones(3), **slices}.items()})
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_relative_path_of_the_other_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    writer = dcp.HuggingFaceStorageWriter("out")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with dcp.AsyncSaver("thread") as saver:
        saver.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True).result()
    assert os.listdir(tmp_path / "elsewhere") == []
    assert len(os.listdir(tmp_path / "out")) == 2


def test_an_export_is_not_copied_in_waves(tmp_path: Path) -> None:
    options = dcp.SaverOptions(max_staging_bytes=2 << 20, staging="waves")
    with dcp.AsyncSaver("thread", options=options) as saver:
        state = {"w": torch.ones(1 << 20)}
        with pytest.raises(UnsupportedValueError, match="takes tensors as a whole"):
            saver.save(state, storage_writer=dcp.SafetensorsWriter(tmp_path / "out"), no_dist=True).result()
    assert os.listdir(tmp_path / "out") == []

"""Block-quantised tensors load as floating-point ones, whole and in parts, with stock's arithmetic as the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dcp_core import CorruptCheckpointError, load
from dcp_format import QuantizedHuggingFaceStorageReader
from dcp_format.hugging_face.hf_reader import dequantize_mxfp4

INDEX_NAME = "model.safetensors.index.json"


def folder(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path / "model.safetensors")
    weight_map = dict.fromkeys(tensors, "model.safetensors")
    (path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def block_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "x.weight": torch.randn(300, 200).to(torch.float8_e4m3fn),
        "x.weight_scale_inv": torch.rand(3, 2) + 0.5,
        "y.weight": torch.randn(10, 4),
    }


def mxfp4_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "e.up_blocks": torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8),
        "e.up_scales": torch.randint(120, 134, (2, 6, 3), dtype=torch.uint8),
    }


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_blocks_are_multiplied_by_their_scales(tmp_path: Path, target: torch.dtype) -> None:
    stored = block_tensors()
    template = {"x.weight": torch.zeros(300, 200, dtype=target), "y.weight": torch.zeros(10, 4)}
    reader = QuantizedHuggingFaceStorageReader(folder(tmp_path, stored), target_dtype=target)
    load(template, storage_reader=reader)
    scale = stored["x.weight_scale_inv"].repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    assert torch.equal(template["x.weight"], (stored["x.weight"].float() * scale).to(target))
    assert torch.equal(template["y.weight"], stored["y.weight"])


@pytest.mark.interop
@pytest.mark.newest
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("tensors", "name", "shape"), [
    (block_tensors, "x.weight", (300, 200)),
    (mxfp4_tensors, "e.up_blocks", (2, 6, 96)),
])  # fmt: skip
def test_same_as_stock(tmp_path: Path, tensors: Any, name: str, shape: tuple[int, ...]) -> None:
    import torch.distributed.checkpoint as stock

    place = folder(tmp_path, tensors())
    ours, theirs = {name: torch.zeros(shape)}, {name: torch.zeros(shape)}
    load(ours, storage_reader=QuantizedHuggingFaceStorageReader(place))
    stock.load(theirs, storage_reader=stock.QuantizedHuggingFaceStorageReader(str(place)), no_dist=True)
    # Stock's metadata keeps the packed chunk's sizes: of a packed tensor it fills a corner, and says nothing.
    filled = theirs[name] != 0
    assert filled.any()
    assert torch.equal(ours[name][filled], theirs[name][filled])
    assert name == "e.up_blocks" or torch.equal(ours[name], theirs[name])


def test_plain_name_of_packed_values(tmp_path: Path) -> None:
    stored = mxfp4_tensors()
    template = {"e.up": torch.zeros(2, 6, 96)}
    load(template, storage_reader=QuantizedHuggingFaceStorageReader(folder(tmp_path, stored)))
    assert torch.equal(template["e.up"], dequantize_mxfp4(stored["e.up_blocks"], stored["e.up_scales"]))


def test_numbers_of_four_bits() -> None:
    blocks = torch.tensor([[[0x10, 0x32, 0xF7]]], dtype=torch.uint8)
    scales = torch.tensor([[128]], dtype=torch.uint8)
    assert dequantize_mxfp4(blocks, scales).tolist() == [[0.0, 1.0, 2.0, 3.0, 12.0, -12.0]]


def part(rank: int, path: Path, tensors: Any, name: str, shape: tuple[int, ...], dim: int) -> tuple[torch.Tensor, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (3,))
    template = {name: zeros(shape, device_mesh=mesh, placements=[Shard(dim)])}
    reader = QuantizedHuggingFaceStorageReader(path)
    load(template, storage_reader=reader)
    return template[name].to_local(), reader.bytes_read


@pytest.mark.parametrize(("tensors", "name", "shape", "dim"), [
    (block_tensors, "x.weight", (300, 200), 0),
    (block_tensors, "x.weight", (300, 200), 1),
    (mxfp4_tensors, "e.up", (2, 6, 96), 1),
    (mxfp4_tensors, "e.up", (2, 6, 96), 2),
])  # fmt: skip
def test_parts_of_ranks(ranks: Any, tmp_path: Path, tensors: Any, name: str, shape: tuple[int, ...], dim: int) -> None:
    place = folder(tmp_path, tensors())
    whole = {name: torch.zeros(shape)}
    load(whole, storage_reader=QuantizedHuggingFaceStorageReader(place))
    parts = ranks.run(3, part, 0, place, tensors, name, shape, dim)
    assert torch.equal(torch.cat([each for each, _ in parts], dim), whole[name])


def test_scales_must_fit(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="check block_size"):
        load(
            {"x.weight": torch.zeros(300, 200)},
            storage_reader=QuantizedHuggingFaceStorageReader(folder(tmp_path, block_tensors()), block_size=64),
        )
    assert issubclass(CorruptCheckpointError, ValueError)

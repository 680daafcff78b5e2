"""Folders of `pytorch_model-*.bin`, variants and files of old versions: read, or a message that says how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dcp_core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)
from dcp_format import HuggingFaceStorageReader, convert
from dcp_format.torch_save.torch_save_read import is_torch_weights, open_torch_weights


def sharded(folder: Path, stem: str = "pytorch_model", value: float = 1) -> Path:
    """Two files and their index."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number in (1, 2):
        name = f"{stem}-{number:05}-of-00002.bin"
        torch.save({f"t{number}": torch.full((3,), value)}, folder / name)
        weight_map[f"t{number}"] = name
    (folder / f"{stem}.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({"lr": 1}, folder / "training_args.bin")
    return folder


def loaded(path: Path, target: Path) -> dict[str, list[float]]:
    target.unlink(missing_ok=True)
    convert(path, target)
    return {name: tensor.tolist() for name, tensor in torch.load(target, weights_only=True).items()}


@pytest.mark.parametrize("stem", ["pytorch_model", "pytorch_model.fp16", "diffusion_pytorch_model"])
def test_a_sharded_folder_is_one_state_dict(tmp_path: Path, stem: str) -> None:
    folder = sharded(tmp_path / "hf", stem)
    for place in (folder, folder / f"{stem}.bin.index.json"):
        assert loaded(place, tmp_path / "all.pt") == {"t1": [1.0] * 3, "t2": [1.0] * 3}


def test_the_set_without_a_variant_is_read(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hf", "pytorch_model.fp16", 2)
    torch.save({"t": torch.ones(1)}, folder / "pytorch_model.bf16.bin")
    with pytest.raises(
        UnsupportedFormatError, match=r"several sets.*bf16\.bin, .*fp16\.bin\.index\.json.*name the one"
    ):
        open_torch_weights(folder)
    torch.save({"t": torch.zeros(1)}, folder / "pytorch_model.bin")
    assert loaded(folder, tmp_path / "all.pt") == {"t": [0.0]}
    assert loaded(folder / "pytorch_model.fp16.bin.index.json", tmp_path / "all.pt")["t1"] == [2.0] * 3


def test_lost_and_contradicting_files_are_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hf")
    second = folder / "pytorch_model-00002-of-00002.bin"
    torch.save({"t1": torch.ones(1), "t2": torch.ones(1)}, second)
    with pytest.raises(CorruptCheckpointError, match="t1"):
        open_torch_weights(folder)
    torch.save({"other": torch.ones(1)}, second)
    with pytest.raises(CorruptCheckpointError, match="t2"):
        open_torch_weights(folder)
    second.unlink()
    with pytest.raises(CheckpointNotFoundError, match="00002-of-00002"):
        open_torch_weights(folder)
    second.symlink_to(tmp_path / "away.bin")
    torch.save({"t2": torch.ones(1)}, tmp_path / "away.bin")
    with pytest.raises(UnsafeCheckpointError, match="leads out"):
        open_torch_weights(folder)


def test_other_folders_are_not_taken(tmp_path: Path) -> None:
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    assert not is_torch_weights(tmp_path)


def test_files_of_old_versions_say_how(tmp_path: Path) -> None:
    path = tmp_path / "old.bin"
    torch.save({"t": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedFormatError, match=r"torch 1\.5 or older.*weights_only=True.*save it again"):
        convert(path, tmp_path / "new.safetensors")


def test_the_safetensors_reader_says_how(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "hf")
    with pytest.raises(CheckpointNotFoundError, match=r"torch\.save wrote; convert"):
        HuggingFaceStorageReader(folder).read_metadata()

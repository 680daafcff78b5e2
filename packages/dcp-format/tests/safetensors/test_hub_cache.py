"""Models in the Hugging Face cache are read through its links; links to anywhere else are not followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dcp_core import UnsafeCheckpointError, load
from dcp_format import HuggingFaceStorageReader, convert
from dcp_format.safetensors.safetensors_index import INDEX_NAME, open_safetensors

NAMES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def cached(folder: Path) -> Path:
    """A snapshot of two files and their index."""
    cache = folder / "models--org--name"
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, name in enumerate(NAMES):
        save_file({f"t{number}": torch.arange(5.0) + number}, cache / "blobs" / f"hash{number}")
        (snapshot / name).symlink_to(f"../../blobs/hash{number}")
    weight_map = {f"t{number}": name for number, name in enumerate(NAMES)}
    (cache / "blobs" / "hash2").write_text(json.dumps({"weight_map": weight_map}))
    (snapshot / INDEX_NAME).symlink_to("../../blobs/hash2")
    return snapshot


def test_a_snapshot_is_read(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    (tmp_path / "link").symlink_to(snapshot)
    for place in (snapshot, snapshot / INDEX_NAME, tmp_path / "link"):
        template = {"t0": torch.zeros(5), "t1": torch.zeros(5)}
        load(template, storage_reader=HuggingFaceStorageReader(place))
        assert [each[0].item() for each in template.values()] == [0, 1]
    assert open_safetensors(snapshot / NAMES[1]).index.tensor_names == ["t1"]
    convert(snapshot, tmp_path / "all.pt")
    assert torch.load(tmp_path / "all.pt", weights_only=True)["t1"][4] == 5


@pytest.mark.parametrize("target", ["../../other/file", "../../../file", "../../blobs/away", "../../blobs/deep/file"])
def test_other_links_are_refused(tmp_path: Path, target: str) -> None:
    snapshot = cached(tmp_path)
    cache = snapshot.parent.parent
    for file in (cache / "other" / "file", tmp_path / "file", cache / "blobs" / "deep" / "file"):
        file.parent.mkdir(exist_ok=True)
        save_file({"t0": torch.ones(5)}, file)
    (cache / "blobs" / "away").symlink_to(tmp_path / "file")
    (snapshot / NAMES[0]).unlink()
    (snapshot / NAMES[0]).symlink_to(target)
    with pytest.raises(UnsafeCheckpointError, match="leads out of that directory"):
        open_safetensors(snapshot)


@pytest.mark.parametrize("parents", ["models/revisions/1", "models/snapshots/1"])
def test_blobs_count_in_a_cache_only(tmp_path: Path, parents: str) -> None:
    """Neither beside a folder of another name, nor where `blobs` itself leads away."""
    snapshot = tmp_path / parents
    snapshot.mkdir(parents=True)
    (tmp_path / "away").mkdir()
    save_file({"t0": torch.ones(5)}, tmp_path / "away" / "hash")
    blobs = tmp_path / "models" / "blobs"
    if "snapshots" in parents:
        blobs.symlink_to(tmp_path / "away")
    else:
        blobs.mkdir()
        save_file({"t0": torch.ones(5)}, blobs / "hash")
    (snapshot / "model.safetensors").symlink_to("../../blobs/hash")
    with pytest.raises(UnsafeCheckpointError, match="leads out of that directory"):
        open_safetensors(snapshot)

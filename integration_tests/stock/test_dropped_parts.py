"""A checkpoint without its optimizer: PyTorch reads what stays, and a load of the optimizer says what became of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_all as dcp
from dcp_io import LocalStore
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint
from dcp_manifest import index_of

# Every load is of one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def values(fill: float) -> dict[str, Any]:
    weight = torch.full((300, 50), fill)
    model = {"weight": weight, "tied": weight, "bias": torch.full((7,), fill), "scale": torch.tensor(fill)}
    return {
        "app": {
            "model": model,
            "optimizer": {"state": {"weight": {"exp_avg": torch.full((300, 50), fill)}}, "groups": [{"lr": fill}]},
        },
        "model_of_another_name": torch.full((3,), fill),
        "step": int(fill),
    }


def model(fill: float) -> dict[str, Any]:
    return {"app": {"model": values(fill)["app"]["model"]}, "step": int(fill)}


@pytest.mark.parametrize(
    "options",
    [{}, {"single_file_per_rank": False}, {"thread_count": 3}, {"layout": "raw"}, {"compression": "auto"}, None],
    ids=["plain", "files", "threads", "raw", "compressed", "of-stock"],
)
def test_what_stays(tmp_path: Path, options: dict[str, Any] | None) -> None:
    tmp_path /= "run/step-3"
    if options is None:
        stock.save(values(3.0), checkpoint_id=tmp_path, no_dist=True)
    else:
        dcp.save(values(3.0), storage_writer=dcp.FileSystemWriter(tmp_path, **options), no_dist=True)
    before = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    smaller = SmallerCheckpoint(LocalStore(tmp_path), keep=["app.model", "step"])
    assert smaller.parts == ["app.optimizer", "model_of_another_name"]
    smaller.publish(by="a test")
    assert dcp.verify_checkpoint(tmp_path).problems == ()
    assert before - sum(path.stat().st_size for path in tmp_path.glob("*.distcp")) == smaller.bytes
    assert (dcp.latest_valid(tmp_path.parent, deep=True) or Path()).path == tmp_path  # type: ignore[union-attr]

    loaded = model(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    check(loaded)
    if options is None or options.keys() <= {"single_file_per_rank", "thread_count"}:
        loaded = model(0.0)
        stock.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        check(loaded)

    with pytest.raises(dcp.LoadMismatchError) as caught:
        dcp.load(values(0.0), checkpoint_id=tmp_path, no_dist=True)
    text = str(caught.value)
    key = "Missing key in checkpoint state_dict: app.optimizer.state.weight.exp_avg"
    assert f"{key}; it was removed after the save (a test, 20" in text
    assert "app.model" not in text


def check(loaded: dict[str, Any]) -> None:
    for name, value in values(3.0)["app"]["model"].items():
        assert torch.equal(loaded["app"]["model"][name], value), name
    assert loaded["step"] == 3


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_later_save_of_stock_is_not_replaced(tmp_path: Path) -> None:
    """Its files have the same names, its index has no id, and offsets in it differ."""
    stock.save({"a": torch.ones(5), "b": torch.ones(9000), "c": torch.ones(70)}, checkpoint_id=tmp_path, no_dist=True)
    smaller = SmallerCheckpoint(LocalStore(tmp_path), keep=["a", "c"])
    state = {"a": torch.zeros(5), "b": torch.zeros(2), "c": torch.zeros(70)}
    stock.save(state, checkpoint_id=tmp_path, no_dist=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(dcp.SaveInProgressError, match="another save has replaced"):
        smaller.publish(by="a test")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_smaller_checkpoints_of_two_stock_saves_differ(tmp_path: Path) -> None:
    origins = set()
    for name in ("one", "two"):
        stock.save({"a": torch.ones(5), name: torch.ones(5)}, checkpoint_id=tmp_path / name, no_dist=True)
        for part in ("a", "unknown"):
            SmallerCheckpoint(LocalStore(tmp_path / name), drop=[part]).publish(by="a test")
        info = index_of(tmp_path / name).info
        assert info is not None
        origins.add(info.origin)
    assert len(origins) == 2


def test_the_tie_of_names_that_stay(tmp_path: Path) -> None:
    """The first name of tied tensors is removed, and the others stay tied."""
    weight = torch.arange(8.0)
    dcp.save({"a": weight, "b": {"x": weight, "y": weight}}, checkpoint_id=tmp_path, no_dist=True)
    SmallerCheckpoint(LocalStore(tmp_path), drop=["a"]).publish(by="a test")
    for load in (dcp.load, stock.load):
        loaded = {"b": {"x": torch.zeros(8), "y": torch.zeros(8)}}
        load(loaded, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(loaded["b"]["x"], weight)
        assert torch.equal(loaded["b"]["y"], weight)
    assert (tmp_path / ".metadata").stat().st_size < 10_000


def test_a_checkpoint_in_another_storage(tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}/step-1"
    dcp.save(values(3.0), checkpoint_id=place, no_dist=True)
    store = dcp.open_store(place)
    SmallerCheckpoint(store, keep=["app.model", "step"]).publish(by="a test")
    assert dcp.verify_checkpoint(store).problems == ()
    assert len(store.list()) == 2
    loaded = model(0.0)
    dcp.load(loaded, checkpoint_id=place, no_dist=True)
    check(loaded)


def test_files_on_several_hosts_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(dcp.UnsupportedFormatError, match="files on several hosts"):
        SmallerCheckpoint(dcp.open_store(f"host://{tmp_path}"), drop=["a"])


def test_empty_dicts_stay_where_they_are(tmp_path: Path) -> None:
    state = {"a": {"x": torch.ones(3), "none": {}}, "b": {"y": torch.ones(3), "none": {}}, "c": {}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    paths = index_of(tmp_path).paths or {}
    assert {"a.none.", "b.none.", "c."} < paths.keys()
    SmallerCheckpoint(LocalStore(tmp_path), keep=["a", "c"]).publish(by="a test")
    assert index_of(tmp_path).paths == {name: path for name, path in paths.items() if name[0] != "b"}

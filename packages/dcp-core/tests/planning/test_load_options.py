"""What a load may be told to put up with, and what its report then says."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch

from dcp_core import DefaultLoadPlanner, LoadMismatchError, LoadReport, PerRank, load, load_keys, save
from dcp_core.planning.load_report import NearNames
from integration_tests.kits.memory import MemoryReader, MemoryWriter


@pytest.fixture
def folder() -> str:
    return uuid.uuid4().hex


def get(folder: str, state_dict: dict[str, Any], **options: Any) -> LoadReport:
    return load(state_dict, storage_reader=MemoryReader(folder), planner=DefaultLoadPlanner(**options))


def put(folder: str, state_dict: dict[str, Any]) -> None:
    save(state_dict, storage_writer=MemoryWriter(folder))


def test_renamed_keys_and_paths(folder: str) -> None:
    put(folder, {"module": {"encoder": {"w": torch.arange(3.0)}, "head_1": torch.ones(2)}, "note": "text", "x": 1})
    template = {"encoder": {"w": torch.zeros(3)}, "heads": {"1": torch.zeros(2)}, "memo": "", "x": 0}
    report = get(
        folder,
        template,
        rename={"encoder": "module.encoder", "memo": "note"},
        rename_regex=[(r"^heads\.(\d)$", r"module.head_\1")],
        strict=True,
    )
    assert torch.equal(template["encoder"]["w"], torch.arange(3.0))
    assert torch.equal(template["heads"]["1"], torch.ones(2))
    assert (template["memo"], template["x"]) == ("text", 1)
    assert report.renamed == {"encoder.w": "module.encoder.w", "heads.1": "module.head_1", "memo": "note"}
    assert report.loaded == ("encoder.w", "heads.1", "memo", "x")
    assert report.unexpected == report.missing == ()
    assert "3 renamed: encoder.w (from module.encoder.w)" in report.summary()


def test_two_names_may_take_one_value(folder: str) -> None:
    put(folder, {"w": torch.arange(3.0), "n": 7})
    template = {"w": torch.zeros(3), "copy": torch.zeros(3, dtype=torch.float64), "n": 0, "m": 0}
    get(folder, template, rename={"copy": "w", "m": "n"})
    assert torch.equal(template["copy"], torch.arange(3.0, dtype=torch.float64))
    assert (template["n"], template["m"]) == (7, 7)


def test_everything_at_once_in_one_error(folder: str) -> None:
    """Row 14 of the scenarios."""
    stored = {f"layers.{n}.weight": torch.zeros(4) for n in range(8)} | {"norm": torch.zeros(4), "extra": torch.ones(1)}
    put(folder, {**stored, "big": torch.zeros(5, 2), "sure": torch.zeros(2)})
    template = {
        **{f"layers.{n}.weigth": torch.zeros(4) for n in range(2)},
        **{f"gone.{n}": torch.zeros(1) for n in range(5)},
        **{f"layers.{n}.weight": torch.zeros(4) for n in range(2, 8)},
        "norm": torch.zeros(4, dtype=torch.bfloat16),
        "big": torch.zeros(6, 2),
        "sure": "text",
    }
    with pytest.raises(LoadMismatchError) as caught:
        get(folder, template, strict=True, rename={"nrom": "norm"})
    kinds = [problem.kind for problem in caught.value.problems]
    assert sorted(kinds) == ["cast", "kind", *["missing"] * 7, "rename", "shape", *["unexpected"] * 3]
    text = str(caught.value)
    assert "Missing key in checkpoint state_dict: layers.0.weigth; did you mean 'layers.0.weight'" in text
    assert "'extra' is in the checkpoint but not in the template" in text
    assert "'nrom', which is not in the template; did you mean 'norm'" in text
    assert "allow_lossy_casts=True" in text
    assert "allow_resize=True" in text
    assert all(not value.any() for value in template.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize(("stored", "wanted"), [((5, 3), (7, 2)), ((4,), (9,)), ((0, 2), (3, 2)), ((3, 2), (0, 2))])
def test_tensors_of_other_sizes(folder: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    whole = torch.randn(stored)
    put(folder, {"t": whole})
    template = {"t": torch.full(wanted, 7.0)}
    expected = template["t"].clone()
    common = tuple(slice(0, min(sizes)) for sizes in zip(stored, wanted, strict=True))
    expected[common] = whole[common]
    report = get(folder, template, allow_resize=True)
    assert torch.equal(template["t"], expected)
    assert report.resized == {"t": (stored, wanted)}
    with pytest.raises(LoadMismatchError, match="allow_resize"):
        get(folder, template)


def test_other_numbers_of_dimensions_are_never_resized(folder: str) -> None:
    put(folder, {"t": torch.zeros(4)})
    with pytest.raises(LoadMismatchError, match=r"current \(2, 2\) for t\.") as caught:
        get(folder, {"t": torch.zeros(2, 2)}, allow_resize=True)
    assert "allow_resize" not in str(caught.value)


def test_new_memory_that_is_not_filled_is_zero(folder: str) -> None:
    put(folder, {"a": torch.ones(3), "b": torch.ones(2)})
    template = {
        "a": torch.empty(3, device="meta"),
        "b": torch.empty(4, device="meta"),
        "c": torch.empty(1000, device="meta"),
        "d": torch.full((2,), 5.0),
    }
    report = get(folder, template, allow_partial_load=True, allow_resize=True)
    assert torch.equal(template["a"], torch.ones(3))
    assert template["b"].tolist() == [1, 1, 0, 0]
    assert not template["c"].any()
    assert template["d"].tolist() == [5, 5]
    assert report.initialised == ("b", "c")
    assert report.missing == ("c", "d")


def test_a_value_for_each_rank_in_a_job_of_one(folder: str) -> None:
    put(folder, {"rng": PerRank({"state": torch.arange(3), "seed": 5}), "loaders": [PerRank("here"), {"x": 1}]})
    template = {
        "rng": PerRank({"state": torch.zeros(3, dtype=torch.int64), "seed": 0}),
        "loaders": [PerRank(""), {"x": 0}],
    }
    held = template["rng"]
    report = get(folder, template)
    assert template["rng"] is held
    assert held.value["state"].tolist() == [0, 1, 2]
    assert held.value["seed"] == 5
    assert template["loaders"][0].value == "here"
    assert report.per_rank == {"loaders.0": 0, "rng": 0}
    everything = load_keys(storage_reader=MemoryReader(folder))
    assert everything["rng"]["rank_0"]["seed"] == 5


def test_a_failed_load_leaves_per_rank_values_where_they_were(folder: str) -> None:
    put(folder, {"x": torch.zeros(2)})
    template = {"x": torch.zeros(3), "deep": {"rng": PerRank(1)}}
    with pytest.raises(LoadMismatchError):
        get(folder, template)
    assert isinstance(template["deep"]["rng"], PerRank)
    assert template["deep"]["rng"].value == 1


def test_near_names_of_many() -> None:
    names = NearNames(f"model.layers.{n}.attention.{part}.weight" for n in range(5000) for part in "qkvo")
    for n in range(50):
        assert f"'model.layers.{n}.attention.q.weight'" in names.suggest(f"model.layers.{n}.attn.q.weight")
    assert names.suggest("zz") == ""

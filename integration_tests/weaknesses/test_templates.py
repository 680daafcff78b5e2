"""Entries A9 to A12 of stock's measured weaknesses: templates that are not filled, or filled with the wrong values."""

from __future__ import annotations

import collections
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_core import DivergentReplicaWarning
from integration_tests.weaknesses.both import our_load, our_save, quiet, stock, stock_load, stock_save


def test_a09_unflattened_template_is_filled(tmp_path: Path) -> None:
    state = {"weight": torch.arange(1.0, 7.0).reshape(2, 3), "step": 7}
    stock_save(state, tmp_path / "stock", stock().DefaultSavePlanner(flatten_state_dict=False))
    silent = stock_load(
        {"weight": torch.zeros(2, 3), "step": 0},
        tmp_path / "stock",
        stock().DefaultLoadPlanner(flatten_state_dict=False),
    )
    assert silent["step"] == 0, "stock should show the defect"
    our_save(state, tmp_path / "ours", dcp.DefaultSavePlanner(flatten_state_dict=False))
    for writer in ("ours", "stock"):
        weight = torch.zeros(2, 3)
        loaded = our_load(
            {"weight": weight, "step": 0}, tmp_path / writer, dcp.DefaultLoadPlanner(flatten_state_dict=False)
        )
        assert loaded["weight"] is weight
        assert torch.equal(weight, state["weight"])
        assert loaded["step"] == 7


# (what is saved, the template, what stock makes of the template, or the error that it raises)
TEMPLATES: dict[str, tuple[Any, Any, Any]] = {
    "int-key": ({"n": {5: "new"}}, {"n": {5: "old"}}, {"n": {5: "old", "5": "new"}}),
    "int-key-at-the-top": ({5: "new"}, {5: "old"}, {5: "old"}),
    "mixed-keys-at-the-top": ({5: "new", "a": "new"}, {5: "old", "a": "old"}, TypeError),
    "key-of-other-type": ({"n": {(1, 2): "new"}}, {"n": {(1, 2): "old"}}, {"n": {(1, 2): "old", "(1, 2)": "new"}}),
    "ordered": (
        {"n": collections.OrderedDict(b="new", a="new")},
        {"n": collections.OrderedDict(b="old", a="old")},
        None,
    ),
    "empty": ({"n": {}, "x": "new"}, {"n": {}, "x": "old"}, None),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_a10_template_keeps_its_keys_and_types(tmp_path: Path, case: str) -> None:
    saved, template, made_by_stock = TEMPLATES[case]
    containers = {key: value for key, value in template.items() if isinstance(value, dict)}
    with quiet():
        old = {key: type(value)(value) if isinstance(value, dict) else value for key, value in template.items()}
    stock_save(saved, tmp_path / "stock")
    if made_by_stock is TypeError:
        with quiet(), pytest.raises((TypeError, BaseException)):
            stock_load(old, tmp_path / "stock")
    elif made_by_stock is not None:
        assert stock_load(old, tmp_path / "stock") == made_by_stock, "stock should show the defect"
    our_save(saved, tmp_path / "ours")
    loaded = our_load(template, tmp_path / "ours")
    assert loaded == saved
    assert list(loaded) == list(saved)
    for key, container in containers.items():
        assert loaded[key] is container
        assert list(container) == list(saved[key])


def test_a10_nesting_is_rebuilt_without_a_template(tmp_path: Path) -> None:
    saved = {5: {7: "x"}, "n": {"empty": {}, "list": [{"t": torch.ones(2)}, {}]}, "last": {}}
    our_save(saved, tmp_path)
    loaded = dcp.load_keys(checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["n"]["list"][0].pop("t"), torch.ones(2))
    assert loaded == {5: {7: "x"}, "n": {"empty": {}, "list": [{}, {}]}, "last": {}}
    with quiet():
        rebuilt = stock().state_dict_loader._load_state_dict_from_keys(checkpoint_id=tmp_path)
    assert rebuilt["5"] == {"7": "x"}, "stock reads what it can of the same checkpoint"


@pytest.mark.parametrize(
    ("stored", "wanted"), [(torch.float32, torch.int64), (torch.float32, torch.bfloat16), (torch.int64, torch.int32)]
)
def test_a11_lossy_cast_is_refused_unless_asked_for(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    value = torch.tensor([1.0, 2.75, -3.001]).to(stored)
    stock_save({"weight": value}, tmp_path / "stock")
    silent = stock_load({"weight": torch.zeros(3, dtype=wanted)}, tmp_path / "stock")["weight"]
    assert torch.equal(silent, value.to(wanted)), "stock should convert without a word"
    our_save({"weight": value}, tmp_path / "ours")
    for writer in ("ours", "stock"):
        template = {"weight": torch.full((3,), 9, dtype=wanted)}
        with pytest.raises(dcp.LoadMismatchError, match="would lose values") as caught:
            our_load(template, tmp_path / writer)
        assert [(problem.key, problem.kind) for problem in caught.value.problems] == [("weight", "cast")]
        assert torch.equal(template["weight"], torch.full((3,), 9, dtype=wanted))
        planner = dcp.DefaultLoadPlanner(allow_lossy_casts=True)
        report = dcp.load(template, checkpoint_id=tmp_path / writer, planner=planner, no_dist=True)
        names = tuple(str(dtype).removeprefix("torch.") for dtype in (stored, wanted))
        assert report.cast == {"weight": names}
        assert torch.equal(template["weight"], value.to(wanted))


def test_a11_object_does_not_take_the_place_of_a_tensor(tmp_path: Path) -> None:
    stock_save({"x": 7}, tmp_path / "stock")
    assert stock_load({"x": torch.zeros(2)}, tmp_path / "stock") == {"x": 7}, "stock should show the defect"
    our_save({"x": 7}, tmp_path / "ours")
    our_save({"x": torch.ones(2)}, tmp_path / "tensor")
    for folder, template in (("ours", torch.zeros(2)), ("stock", torch.zeros(2)), ("tensor", 7)):
        with pytest.raises(dcp.LoadMismatchError) as caught:
            our_load({"x": template}, tmp_path / folder)
        assert [(problem.key, problem.kind) for problem in caught.value.problems] == [("x", "kind")]


def _save_divergent(module: str, folder: str, replicas: str | None) -> tuple[list[str], Any]:
    """Save values that differ by rank: the warnings of this rank, and what loads back."""
    library = importlib.import_module(module)
    rank = dist.get_rank()
    state = {"same": torch.ones(3), "step": 7, "seed": torch.tensor([rank, 1]), "name": f"rank {rank}"}
    planner = library.DefaultSavePlanner(**({"replicas": replicas} if replicas else {}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library.save(state, checkpoint_id=folder, planner=planner)
    with quiet():
        loaded = {"seed": torch.tensor([-1, -1]), "name": ""}
        library.load(loaded, checkpoint_id=folder)
    told = [str(each.message) for each in caught if issubclass(each.category, DivergentReplicaWarning)]
    return told, (loaded["seed"].tolist(), loaded["name"])


def test_a12_divergent_replicas_are_named_and_the_lowest_rank_wins(ranks: Any, tmp_path: Path) -> None:
    silent = ranks.run(4, _save_divergent, "torch.distributed.checkpoint", str(tmp_path / "stock"), None)
    assert [told for told, _ in silent] == [[]] * 4
    assert silent[0][1] != ([0, 1], "rank 0"), "stock should show the defect"
    found = ranks.run(4, _save_divergent, "dcp_all", str(tmp_path / "ours"), None)
    assert [loaded for _, loaded in found] == [([0, 1], "rank 0")] * 4
    (text,) = found[0][0]
    assert "'seed' on ranks [1, 2, 3]" in text
    assert "'name' on ranks [1, 2, 3]" in text
    assert "'same'" not in text
    assert "'step'" not in text
    assert ranks.run(4, _save_divergent, "dcp_all", str(tmp_path / "quiet"), "ignore")[0][0] == []


def _save_and_catch(module: str, folder: str, kind: str) -> str:
    library = importlib.import_module(module)
    rank = dist.get_rank()
    values = {"shape": torch.ones(2 + rank), "dtype": torch.ones(2, dtype=(torch.float32, torch.int32)[rank])}
    values |= {"kind": torch.ones(2) if rank else 7, "value": torch.tensor(rank)}
    strict = module == "dcp_all" and kind == "value"
    planner = library.DefaultSavePlanner(**({"replicas": "raise"} if strict else {}))
    try:
        with quiet():
            library.save({"seed": values[kind]}, checkpoint_id=folder, planner=planner)
    except dcp.CheckpointException as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("value", "'seed' on ranks [1]"),
        ("shape", "(2,) on rank 0, torch.float32 (3,) on rank 1"),
        ("dtype", "torch.float32 (2,) on rank 0, torch.int32 (2,) on rank 1"),
        ("kind", "a tensor on one rank and an object on another"),
    ],
)
def test_a12_values_that_differ_raise_on_every_rank(ranks: Any, tmp_path: Path, kind: str, message: str) -> None:
    if kind in ("value", "shape"):
        told = ranks.run(2, _save_and_catch, "torch.distributed.checkpoint", str(tmp_path / "stock"), kind)
        assert told == ["saved", "saved"], "stock should show the defect"
    told = ranks.run(2, _save_and_catch, "dcp_all", str(tmp_path / "ours"), kind)
    for text in told:
        assert message in text
        assert "'seed'" in text
        assert "rank 0" in text
    assert not list((tmp_path / "ours").glob("*"))

"""The commands that look at values: on checkpoints of ours and of stock, torch.save files and safetensors."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dcp_all import FileSystemWriter, run_command, save
from integration_tests.kits.damage import flip

GOLDEN = Path(__file__).parents[1] / "golden"


def state(change: float = 0.0) -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(40, 6)
    weight[3, 2] += change
    return {
        "model": {"weight": weight, "bias": torch.arange(6, dtype=torch.bfloat16), "tied": weight},
        "count": torch.arange(5),
        "step": 7 + (change > 0),
    }


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    save(state(), storage_writer=FileSystemWriter(tmp_path / "a"))
    save(state(0.5), storage_writer=FileSystemWriter(tmp_path / "b"))
    torch.save(state(), tmp_path / "a.pt")
    tensors = {"model.weight": state()["model"]["weight"], "count": torch.arange(5)}
    save_file(tensors, tmp_path / "a.safetensors")
    return {path.name: path for path in tmp_path.iterdir()}


def dcp(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run_command([str(each) for each in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("name", ["a", "a.pt", "a.safetensors"])
def test_show_and_cat_of_every_format(capsys: Any, places: dict[str, Path], name: str) -> None:
    code, out, err = dcp(capsys, "show", places[name], "--json")
    assert (code, err) == (0, "")
    assert {"model.weight", "count"} <= {row["name"] for row in json.loads(out)["values"]}
    code, out, _ = dcp(capsys, "cat", places[name], "count[1:4]", "--json")
    assert (code, json.loads(out)["values"]) == (0, [1, 2, 3])
    code, out, _ = dcp(capsys, "cat", places[name], "model.weight[3, 2:4]", "--json")
    assert json.loads(out)["values"] == state()["model"]["weight"][3, 2:4].tolist()


def test_cat(capsys: Any, places: dict[str, Path]) -> None:
    a = places["a"]
    assert dcp(capsys, "cat", a, "step")[1] == "7\n"
    assert dcp(capsys, "cat", a, "count")[1] == "count: int64 (5,)\n[0, 1, 2, 3, 4]\n"
    assert json.loads(dcp(capsys, "cat", a, "model.tied[-1]", "--json")[1])["values"] == (
        state()["model"]["weight"][-1].tolist()
    )
    assert json.loads(dcp(capsys, "cat", a, "model.bias[::2]", "--json")[1])["values"] == [0.0, 2.0, 4.0]
    assert json.loads(dcp(capsys, "cat", a, "model.weight[..., 0]", "--json")[1])["shape"] == [40]
    for wrong in ("count[9]", "count[a]", "count[::-1]", "count[0, 0]"):
        assert dcp(capsys, "cat", a, wrong)[0] in (2, 3)
    code, _, err = dcp(capsys, "cat", a, "model.wieght")
    assert code == 3
    assert "near it: model.weight" in err


def test_cat_of_a_tensor_that_is_read_in_many_pieces(capsys: Any, tmp_path: Path) -> None:
    """Pieces of a compressed tensor are read into the same memory, one after the other."""
    save(
        {"weight": torch.arange(8 << 20, dtype=torch.int32).reshape(4, -1)},
        storage_writer=FileSystemWriter(tmp_path, compression="zstd"),
    )
    said = json.loads(dcp(capsys, "cat", tmp_path, "weight[..., 0]", "--json")[1])
    assert said["values"] == [0, 2 << 20, 4 << 20, 6 << 20]


def test_statistics(capsys: Any, places: dict[str, Path]) -> None:
    code, out, _ = dcp(capsys, "show", places["a"], "model.weight", "--stats", "--json")
    stats = json.loads(out)["values"][0]["stats"]
    weight = state()["model"]["weight"].double()
    assert code == 0
    assert stats["min"] == weight.min()
    assert stats["max"] == weight.max()
    assert stats["mean"] == pytest.approx(weight.mean().item())
    assert stats["std"] == pytest.approx(weight.std(correction=0).item())
    assert stats["nonfinite"] == 0


def test_diff(capsys: Any, places: dict[str, Path]) -> None:
    assert dcp(capsys, "diff", places["a"], places["a.pt"]) == (0, "equal: 5 values\n", "")
    code, out, _ = dcp(capsys, "diff", places["a"], places["b"], "--json")
    report = json.loads(out)
    found = {each["name"]: each for each in report["differences"]}
    assert (code, report["equal"], set(found)) == (1, False, {"model.weight", "model.tied", "step"})
    assert found["model.weight"]["different"] == 1
    assert found["model.weight"]["max_abs"] == pytest.approx(0.5, abs=1e-6)
    assert (found["step"]["a"], found["step"]["b"]) == ("7", "8")
    assert dcp(capsys, "diff", places["a"], places["b"], "--keys-only")[0] == 0
    assert "step" in dcp(capsys, "diff", places["a"], places["b"], "--atol", 1)[1]
    code, out, _ = dcp(capsys, "diff", places["a"], places["a.safetensors"])
    assert code == 1
    assert out.count("only in A") == 3


@pytest.mark.parametrize(
    ("a", "b", "different"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], 0),
        ([1.0, float("nan")], [1.0, 2.0], 1),
        ([float("inf"), 1.0], [float("inf"), 1.0], 0),
        ([float("inf"), 1.0], [1.0, 1.0], 1),
        ([2**62, 1], [2**62 + 1, 1], 1),
        ([0.0, -0.0], [-0.0, 0.0], 2),
    ],
)
def test_diff_of_special_values(capsys: Any, tmp_path: Path, a: list[Any], b: list[Any], different: int) -> None:
    for name, values in (("a", a), ("b", b)):
        save_file({"w": torch.tensor(values)}, tmp_path / f"{name}.safetensors")
    _, out, _ = dcp(capsys, "diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    found = json.loads(out.replace("Infinity", "1e999"))["differences"]
    assert sum(each["different"] for each in found) == different


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        (torch.tensor(0.5), torch.tensor(0.25), ("0.5", "0.25")),
        (torch.tensor([[0.1]]), torch.tensor([[0.3]]), ("0.1", "0.3")),
        (torch.tensor([0.5]).bfloat16(), torch.tensor([float("nan")]).bfloat16(), ("0.5", "nan")),
        (torch.tensor(2**62), torch.tensor(2**62 + 1), (str(2**62), str(2**62 + 1))),
        (torch.tensor(True), torch.tensor(False), ("True", "False")),
        (torch.tensor(7), torch.tensor(7.5), ("7", "7.5")),
        (torch.ones(2), torch.zeros(2), ("", "")),
    ],
)
def test_diff_shows_the_values_of_tensors_with_one_element(
    capsys: Any, tmp_path: Path, a: torch.Tensor, b: torch.Tensor, shown: tuple[str, str]
) -> None:
    for name, value in (("a", a), ("b", b)):
        torch.save({"w": value}, tmp_path / f"{name}.pt")
    code, out, _ = dcp(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    (found,) = (each for each in json.loads(out)["differences"] if each["what"] == "values")
    assert (code, found["a"], found["b"]) == (1, *shown)
    out = dcp(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt")[1]
    (line,) = (line for line in map(str.split, out.splitlines()) if line[:2] == ["w", "values"])
    assert line[2 : 2 + len(" ".join(shown).split())] == [*filter(None, shown)]


NAN = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32)
"""Three values that are no numbers, of other bits each."""


def test_diff_shows_where_long_values_differ(capsys: Any, tmp_path: Path) -> None:
    words = [f"word {number}" for number in range(100)]
    torch.save({"words": words}, tmp_path / "a.pt")
    torch.save({"words": [*words[:50], "another", *words[51:]]}, tmp_path / "b.pt")
    _, out, _ = dcp(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    (found,) = json.loads(out)["differences"]
    assert "'word 50'" in found["a"]
    assert "'another'" in found["b"]
    assert max(len(found["a"]), len(found["b"])) <= 62


def test_diff_compares_tensors_by_bits_unless_a_tolerance_is_given(capsys: Any, tmp_path: Path) -> None:
    zeros, pairs = torch.tensor([0.0, -0.0]), torch.tensor([0.0, -0.0, 1.0, -2.0]).view(torch.complex64)
    a = {"nan": NAN, "zero": zeros, "complex": pairs, "byte": torch.tensor([0x00, 0x80]).byte()}
    b = {"nan": NAN.flip(0), "zero": zeros.flip(0), "complex": pairs.conj().resolve_conj(), "byte": a["byte"].clone()}
    a["small"], b["small"] = (each["byte"].view(torch.float8_e5m2) for each in (a, {"byte": b["byte"].flip(0)}))
    for name, values in (("a", a), ("b", b)):
        torch.save(values, tmp_path / f"{name}.pt")
    code, out, _ = dcp(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    found = {each["name"]: each["different"] for each in json.loads(out)["differences"]}
    assert (code, found) == (1, {"nan": 2, "zero": 2, "complex": 2, "small": 2})
    code, out, _ = dcp(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json", "--atol", "1e-9")
    assert [each["name"] for each in json.loads(out)["differences"]] == ["complex"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0), (1, True), (1, 1.0), (0j, -0.0j), ("a", b"a"), ((1,), (True,)), ([0.0], [-0.0]),
        (np.float64(1), 1.0), (np.zeros(2), np.zeros(2, np.int64)), ((torch.zeros(2),), (-torch.zeros(2),)),
    ],
)  # fmt: skip
def test_diff_compares_objects_by_type_and_bits(capsys: Any, tmp_path: Path, one: Any, other: Any) -> None:
    for name, value in (("a", one), ("b", other), ("c", copy.deepcopy(one))):
        torch.save({"value": value, "nan": math.nan, "twice": [name * 0 + "x"] * 2}, tmp_path / f"{name}.pt")
    code, out, _ = dcp(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    assert (code, [each["name"] for each in json.loads(out)["differences"]]) == (1, ["value"])
    assert dcp(capsys, "diff", tmp_path / "a.pt", tmp_path / "c.pt")[0] == 0


def test_convert(capsys: Any, places: dict[str, Path], tmp_path: Path) -> None:
    code, out, err = dcp(capsys, "convert", places["a"], tmp_path / "out.safetensors")
    assert (code, out) == (4, "")
    assert "'step' is not a tensor: " in err
    options = ("--objects", "skip", "--dtype", "float16", "--rename", "model=net", "--exclude", "*.tied")
    code, out, _ = dcp(capsys, "convert", places["a"], tmp_path / "out.safetensors", *options, "--json")
    assert code == 0
    assert json.loads(out)["tensors"] == 3
    loaded = load_file(tmp_path / "out.safetensors")
    assert {name: each.dtype for name, each in loaded.items()} == {
        "net.weight": torch.float16,
        "net.bias": torch.float16,
        "count": torch.int64,
    }
    assert dcp(capsys, "convert", places["a"], tmp_path / "out.safetensors", "--objects", "skip")[0] == 7
    assert dcp(capsys, "convert", places["a"], tmp_path / "x", "--dtype", "int8")[0] == 2
    assert dcp(capsys, "convert", places["a"], tmp_path / "x.hf", "--shard-size", "many")[0] == 2
    assert dcp(capsys, "convert", tmp_path / "nothing", tmp_path / "x")[0] == 3
    assert dcp(capsys, "convert", places["a.pt"], tmp_path / "x", "--layout", "raw")[0] == 0
    assert dcp(capsys, "diff", places["a"], tmp_path / "x")[0] == 0


@pytest.mark.interop
def test_checkpoints_of_stock(capsys: Any, tmp_path: Path) -> None:
    place = GOLDEN / "stock" / "torch-2.13.0"
    assert dcp(capsys, "verify", place)[0] == 0
    code, out, _ = dcp(capsys, "show", place, "--json")
    assert code == 0
    assert json.loads(out)["writer"] is None
    assert dcp(capsys, "convert", place, tmp_path / "a.pt")[0] == 0
    assert dcp(capsys, "diff", place, tmp_path / "a.pt")[0] == 0
    assert dcp(capsys, "plan", place, "--world", 2)[0] == 0


def test_damaged_values(capsys: Any, places: dict[str, Path]) -> None:
    (data,) = places["a"].glob("*.distcp")
    flip(data)
    assert dcp(capsys, "verify", places["a"])[0] == 1
    codes = {dcp(capsys, *each)[0] for each in (("diff", places["a"], places["a.pt"]),)}
    assert codes <= {0, 1, 4}
    (places["a.pt"]).write_text("not an archive")
    code, _, err = dcp(capsys, "show", places["a.pt"])
    assert code == 5
    assert "of no known format" in err

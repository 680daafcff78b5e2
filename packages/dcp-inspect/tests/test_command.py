"""Every command as a new user would try it: on good, damaged, foreign and missing input. What it says is the test.

These run where torch is not installed: the checkpoints are made of bytes. What needs values is in `test_values`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from dcp_base import PluginRegistry, StoreSpec, hookimpl, installed
from dcp_inspect.cli import COMMANDS
from dcp_inspect.layout import plan_reads, plan_writes
from dcp_io.saves.save_files import this_process
from dcp_manifest import index_of

Dcp = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]
DataFile = Callable[[Path], Path]


def test_ls(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    for step in (100, 200):
        path = write(tmp_path / f"step-{step}")
        os.utime(path / ".metadata", (step, step))
    data_file(tmp_path / "step-100").unlink()
    code, out, err = dcp("ls", tmp_path)
    assert (code, err) == (0, "")
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert lines[0] == ["checkpoint", "step", "size", "ranks", "values", "age", "state"]
    assert lines[1][:5] == ["step-200", "200", "257 KiB", "2", "4"]
    assert lines[1][-1] == "complete"
    assert lines[2][0] == "step-100"
    assert lines[2][-1].endswith("is missing")
    code, out, _ = dcp("ls", tmp_path, "--json")
    assert [(each["step"], each["complete"], each["world_size"]) for each in json.loads(out)] == [
        (200, True, 2),
        (100, False, 2),
    ]


def test_ls_lists_unfinished_saves(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    for step in (1, 2, 3):
        write(tmp_path / "run" / f"step-{step}")
    for step in (2, 3):
        (tmp_path / "run" / f"step-{step}" / ".metadata").unlink()
    alive = {"save_id": "0123456789abcdef", "rank": None, "phase": "saving", "started_ns": 1, "replaced": []}
    marker = json.dumps({**alive, "process": this_process().to_dict()})
    (tmp_path / "run" / "step-3" / ".dcp-save-0123456789abcdef").write_text(marker)
    (tmp_path / "run" / "step-1" / "sub").mkdir()  # the index may name data files in folders below
    (tmp_path / "run" / "step-1" / "sub" / "__0_0.distcp").write_bytes(b"x")
    code, out, err = dcp("ls", tmp_path, "--json")
    assert (code, err) == (0, "")
    found = {Path(each["path"]).name: each for each in json.loads(out)}
    assert [*found] == ["step-3", "step-2", "step-1"]
    assert [each["unfinished"] for each in found.values()] == [True, True, False]
    assert [each["complete"] for each in found.values()] == [False, False, True]
    assert found["step-3"]["problem"].startswith("being saved: save 0123456789abcdef of process")
    assert "unfinished" in found["step-2"]["problem"]
    assert found["step-2"]["bytes"] > 250_000
    (tmp_path / "run" / "step-1" / ".metadata").unlink()
    shutil.rmtree(tmp_path / "run" / "step-1")
    assert dcp("ls", tmp_path)[0] == 0  # though there is no checkpoint
    code, _, err = dcp("show", tmp_path / "run" / "step-2")
    assert (code, "holds an unfinished save and no checkpoint" in err) == (3, True)


def test_ls_of_a_cut_file(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    path = write(tmp_path / "step-1")
    os.truncate(data_file(path), 1000)
    _, out, _ = dcp("ls", tmp_path, "--json")
    (one,) = json.loads(out)
    assert not one["complete"]
    assert "has 1,000 of" in one["problem"]


def test_show(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    path = write(tmp_path / "c")
    code, out, err = dcp("show", path)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{path}: 2 tensors, 1 object, 1 alias, 250 KiB, 2 ranks, written by test/1",
        "model  2 values, 250 KiB",
        "├── weight  float32  4000 × 16  2 chunks  250 KiB",
        "└── tied  = model.weight",
        "step  int64  scalar  8 B",
        "note  object  10 B",
    ]
    assert "weight" not in dcp("show", path, "--depth", 1)[1]
    code, out, _ = dcp("show", path, "*.weight", "--json")
    (row,) = json.loads(out)["values"]
    assert (row["name"], row["shape"], row["chunks"], row["bytes"]) == ("model.weight", [4000, 16], 2, 256_000)
    assert "model.weight" in dcp("show", path, "--flat")[1]
    code, out, err = dcp("show", path, "nothing*")
    assert (code, out) == (3, "")
    assert err == f"dcp: no name in {path} matches 'nothing*'; `dcp show {path}` lists all\n"


def test_a_folder_of_safetensors_is_shown(tmp_path: Path, dcp: Dcp) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("dcp_format")
    from safetensors.numpy import save_file

    (tmp_path / "folder").mkdir()
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "folder" / "model.safetensors")
    for arguments in (("show", tmp_path / "folder"), ("cat", tmp_path / "folder", "w")):
        code, out, err = dcp(*arguments)
        assert (code, err) == (0, "")
        assert "float32" in out
    assert dcp("verify", tmp_path / "folder")[0] == 5


def test_values_of_small_objects_are_shown(tmp_path: Path, dcp: Dcp) -> None:
    torch, save = pytest.importorskip("torch"), pytest.importorskip("dcp_core").save
    state = {"step": 7, "config": {"lr": 0.1, "tags": ["a", None]}, "t": (torch.ones(1),), "long": "x" * 100, "z": 1j}
    save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    code, out, _ = dcp("show", tmp_path / "c")
    assert code == 0
    for line in ("step  object  7  ", "lr  object  0.1  ", "'" + "x" * 58 + "…  "):
        assert line in out
    assert re.search(r"^z +object +[\d.]+ (Ki)?B *$", out, re.MULTILINE)  # a complex number: its size alone
    rows = {each["name"]: each["value"] for each in json.loads(dcp("show", tmp_path / "c", "--json")[1])["values"]}
    assert (rows["step"], rows["long"], rows["z"]) == ("7", repr("x" * 100), None)
    assert "0.1" in dcp("show", tmp_path / "c", "config.*")[1]


def test_cat_gives_json_values(tmp_path: Path, dcp: Dcp) -> None:
    save = pytest.importorskip("dcp_core").save
    values = {"i": 7, "nan": float("nan"), "inf": float("inf"), "d": {"a": [1, None]}, "t": ((1, 2), 3)}
    save({"x": values}, checkpoint_id=tmp_path / "c", no_dist=True)
    expected = {"x.i": 7, "x.nan": "NaN", "x.inf": "Infinity", "x.d.a": [1, None], "x.t": "((1, 2), 3)"}
    names = [each["name"] for each in json.loads(dcp("show", tmp_path / "c", "--json")[1])["values"]]
    said = {name: dcp("cat", tmp_path / "c", name, "--json")[1] for name in names}
    found = {name: json.loads(text, parse_constant=pytest.fail)["value"] for name, text in said.items()}
    assert {name: found[name] for name in expected if name in found} == {
        name: value for name, value in expected.items() if name in found
    }
    assert {"x.i", "x.nan", "x.inf"} <= set(found)


def test_plan(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    path = write(tmp_path / "c")
    code, out, _ = dcp("plan", path, "--world", 4, "--json")
    plan = json.loads(out)
    assert code == 0
    assert [load["needed_bytes"] for load in plan["ranks"]] == [64_008] * 4
    assert sum(load["write_bytes"] for load in plan["ranks"]) == 256_008
    assert all(load["needed_bytes"] <= load["read_bytes"] <= 128_008 for load in plan["ranks"])
    code, out, _ = dcp("plan", path, "--world", 2, "--svg", tmp_path / "a.svg", "--html", tmp_path / "a.html")
    assert code == 0
    assert "read by 2 ranks" in out
    assert (tmp_path / "a.svg").read_text().startswith("<svg ")
    assert (tmp_path / "a.svg").read_text().count("model.weight: rank 1") == 1
    assert "<svg " in (tmp_path / "a.html").read_text()


def test_plugins(dcp: Dcp) -> None:
    code, out, _ = dcp("plugins", "--json")
    assert code == 0
    for one in json.loads(out):
        assert one["problem"] is None
        assert one["hooks"]
    assert dcp("plugins")[0] == 0


class Wrong:
    """Names what is not there."""

    @hookimpl
    def dcp_register_converters(self) -> dict[str, str]:
        return {"gone": "no_such_module_anywhere:Format"}

    @hookimpl
    def dcp_register_stores(self) -> list[StoreSpec]:
        return [StoreSpec("toy", "io:BytesIO")]


def test_plugins_that_are_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dcp: Dcp) -> None:
    info = tmp_path / "bad-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[dcp-of-test]\nbad = no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed, "__dict__", vars(PluginRegistry("dcp-of-test")))
    installed.register(Wrong(), name="wrong")
    code, out, _ = dcp("plugins", "--json")
    assert code == 1
    bad, wrong = json.loads(out)
    assert {**bad, "problem": ""} == {
        "name": "bad",
        "distribution": "bad 1.2",
        "module": "no_such_module_anywhere",
        "hooks": [],
        "offers": [],
        "problem": "",
    }
    assert "No module named" in bad["problem"]
    assert (wrong["problem"], wrong["offers"]) == (None, ["toy://", "gone"])
    assert wrong["hooks"] == ["dcp_register_converters", "dcp_register_stores"]
    code, out, _ = dcp("plugins", "--load", "--json")
    assert "no_such_module_anywhere:Format" in json.loads(out)[1]["problem"]


def test_no_plugins(monkeypatch: pytest.MonkeyPatch, dcp: Dcp) -> None:
    monkeypatch.setattr(installed, "__dict__", vars(PluginRegistry("dcp-of-no-one")))
    code, out, _ = dcp("plugins")
    assert (code, out.split("\n")[0].startswith("no installed package")) == (0, True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, dcp: Dcp) -> None:
    code, out, _ = dcp("completion", shell)
    assert code == 0
    assert "_DCP_COMPLETE" in out


READERS = [("show",), ("verify",), ("plan", "--world", "2"), ("rm", "--yes")]


@pytest.mark.parametrize("command", READERS, ids=lambda each: each[0])
def test_wrong_paths_give_one_line(tmp_path: Path, command: tuple[str, ...], dcp: Dcp) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "nothing", tmp_path / "empty"):
        code, out, err = dcp(command[0], place, *command[1:])
        assert code == 3
        said = out + err
        assert str(place) in said.replace("\n", "")
        assert "Traceback" not in said


@pytest.mark.parametrize("command", READERS[:3], ids=lambda each: each[0])
def test_damaged_and_newer_indexes(tmp_path: Path, command: tuple[str, ...], dcp: Dcp, write: Write) -> None:
    path = write(tmp_path / "c")
    whole = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(whole[: len(whole) // 2])
    code, out, err = dcp(command[0], path, *command[1:])
    assert code == (1 if command[0] == "verify" else 4)
    assert ".metadata" in out + err
    assert "Traceback" not in out + err
    (path / ".metadata").write_bytes(b"")
    code, out, err = dcp(command[0], path, *command[1:])
    assert code == (1 if command[0] == "verify" else 4)


def test_folder_of_checkpoints_is_pointed_out(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    write(tmp_path / "runs" / "step-1")
    code, _, err = dcp("show", tmp_path / "runs")
    assert code == 3
    assert f"`dcp ls {tmp_path / 'runs'}` lists the checkpoint below it" in err


def test_wrong_use(tmp_path: Path, dcp: Dcp) -> None:
    assert dcp("nonsense")[0] == 2
    assert dcp("plan", tmp_path)[0] == 2
    assert dcp("ls", tmp_path / "nothing")[0] == 3
    assert dcp("ls", tmp_path)[0] == 3
    code, out, _ = dcp("--help")
    assert code == 0
    assert all(f"  {name} " in out for name in COMMANDS)
    assert dcp("--version")[0] == 0


WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Refuse())
from dcp_inspect.cli import run
codes = [run(arguments.split()) for arguments in sys.argv[1:]]
print(codes, any(name.split(".")[0] == "torch" for name in sys.modules))
"""


def test_without_torch(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "c")
    commands = [
        f"ls {tmp_path}",
        f"show {path}",
        f"verify {path}",
        "plugins",
        f"plan {path} --world 2",
        f"cat {path} step",
        f"cat {path} model.weight[1:3,0]",
        f"show {path} --stats",
        f"diff {path} {path}",
        f"convert {path} x.pt",
    ]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *commands], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert ran.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 0, 0, 0, 5] False", ran.stdout
    lacks = "PyTorch, which is not installed (https://pytorch.org/" if find_spec("dcp_format") else "dcp-format, which"
    assert ran.stderr.startswith(f"dcp: converting needs {lacks}")


def test_module_and_script_are_one(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "c")
    ran = subprocess.run(
        [sys.executable, "-m", "dcp_inspect", "ls", str(tmp_path)], capture_output=True, text=True, check=True
    )
    script = shutil.which("dcp", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("the script is not installed")
    other = subprocess.run([script, "ls", str(tmp_path)], capture_output=True, text=True, check=True)
    assert "complete" in ran.stdout
    assert ran.stdout.split("age")[0].split() == other.stdout.split("age")[0].split()
    assert "\x1b" not in ran.stdout


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_plans_without_segments_are_the_same(tmp_path: Path, world_size: int, write: Write) -> None:
    index = index_of(write(tmp_path / "c", rows=10))
    ranks, segments = plan_reads(index, world_size)
    assert {segment.rank for segment in segments} == set(range(world_size))  # all read the scalar
    assert plan_reads(index, world_size, want_segments=False) == (ranks, [])
    rows = [sum(each.name == "model.weight" and each.rank == rank for each in segments) for rank in range(world_size)]
    step = -(-10 // world_size)
    assert [bool(count) for count in rows] == [rank * step < 10 for rank in range(world_size)]
    assert sum(load.needed_bytes for load in ranks) == 10 * 16 * 4 + 8 * world_size
    plan_writes(index, ranks)
    assert sum(load.write_bytes for load in ranks) == 10 * 16 * 4 + 8
    assert np.ptp([load.write_bytes for load in ranks]) <= step * 64 + 8


def test_damage_is_no_wrong_use_of_slices(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    pytest.importorskip("dcp_format")
    path = write(tmp_path / "c")
    data = data_file(path)
    content = bytearray(data.read_bytes())
    for at in range(100, len(content), 1000):
        content[at] ^= 1
    data.write_bytes(content)
    code, out, err = dcp("cat", path, "model.weight[0:2]")
    assert (code, out) == (4, "")
    assert "'model.weight'" in err

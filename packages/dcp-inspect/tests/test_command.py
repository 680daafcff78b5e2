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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_hooks import PluginRegistry, StoreSpec, hookimpl, installed
from dcp_inspect.cli import COMMANDS, run
from dcp_inspect.layout import plan_reads, plan_writes
from dcp_io import LocalStore, Payload, ProcessIdentity, StoreBackend, WriteRequest, this_process
from dcp_io.testing.damage import flip
from dcp_manifest import CheckpointIndex, Framing, ManifestInfo, encode, index_of


def write(path: Path, *, rows: int = 4000, layout: Any = "torch") -> Path:
    """A checkpoint of two ranks' halves of a matrix, a scalar, another name of the matrix, and an object."""
    data = np.random.default_rng(0).standard_normal((rows, 16)).astype(np.float32)
    half = rows // 2
    parts = [("model.weight", data[:half]), ("model.weight", data[half:]), ("step", np.array(7, np.int64))]
    requests = []
    for name, part in parts:
        payload = Payload(part.tobytes(), Framing.RAW, str(part.dtype), part.shape)
        requests.append(WriteRequest(name, part.nbytes, lambda payload=payload: payload))
    requests.append(WriteRequest("note", 0, lambda: Payload(b"no archive", Framing.OBJECT)))
    backend = StoreBackend(LocalStore(path), layout=layout)
    save_id = backend.begin_save(overwrite=True)
    stored = backend.write(requests, prefix="__0_", save_id=save_id)
    index = CheckpointIndex(
        dtypes=("float32", "int64"),
        files=stored.files,
        tensor_names=["model.weight", "step"],
        tensor_dtype=np.array([0, 1], np.uint8),
        tensor_flags=np.zeros(2, np.uint8),
        tensor_ndim=np.array([2, 0], np.uint8),
        tensor_owner=np.zeros(2, np.uint32),
        tensor_shape=np.array([rows, 16]),
        tensor_chunks=np.array([2, 1]),
        chunk_offsets=np.array([0, 0, half, 0]),
        chunk_sizes=np.array([half, 16, half, 16]),
        chunk_items=stored.take(np.arange(3)).columns,
        object_names=["note"],
        object_owner=np.zeros(1, np.uint32),
        object_items=stored.take(np.arange(3, 4)).columns,
        alias_names=["model.tied"],
        alias_targets=np.zeros(1, np.uint32),
        info=ManifestInfo(save_id, 2, "test/1"),
    )
    backend.publish(".metadata", encode(index))
    backend.finish_save(index.files)
    return path


def dcp(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run([str(each) for each in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def data_file(path: Path) -> Path:
    (found,) = path.glob("*.distcp")
    return found


def test_ls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (100, 200):
        path = write(tmp_path / f"step-{step}")
        os.utime(path / ".metadata", (step, step))
    data_file(tmp_path / "step-100").unlink()
    code, out, err = dcp(capsys, "ls", tmp_path)
    assert (code, err) == (0, "")
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert lines[0] == ["checkpoint", "step", "size", "ranks", "values", "age", "state"]
    assert lines[1][:5] == ["step-200", "200", "251 KiB", "2", "4"]
    assert lines[1][-1] == "valid"
    assert lines[2][0] == "step-100"
    assert lines[2][-1].endswith("is missing")
    code, out, _ = dcp(capsys, "ls", tmp_path, "--json")
    assert [(each["step"], each["valid"], each["world_size"]) for each in json.loads(out)] == [
        (200, True, 2),
        (100, False, 2),
    ]


def test_ls_of_a_cut_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "step-1")
    os.truncate(data_file(path), 1000)
    _, out, _ = dcp(capsys, "ls", tmp_path, "--json")
    (one,) = json.loads(out)
    assert not one["valid"]
    assert "has 1000 of" in one["problem"]


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c")
    code, out, err = dcp(capsys, "show", path)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{path}: 2 tensors, 1 object, 1 alias, 250 KiB, 2 ranks, written by test/1",
        "model  2 values, 250 KiB",
        "├── weight  float32  4000 × 16  2 chunks  250 KiB",
        "└── tied  = model.weight",
        "step  int64  scalar  8 B",
        "note  object  10 B",
    ]
    assert "weight" not in dcp(capsys, "show", path, "--depth", 1)[1]
    code, out, _ = dcp(capsys, "show", path, "*.weight", "--json")
    (row,) = json.loads(out)["values"]
    assert (row["name"], row["shape"], row["chunks"], row["bytes"]) == ("model.weight", [4000, 16], 2, 256_000)
    assert "model.weight" in dcp(capsys, "show", path, "--flat")[1]
    code, out, err = dcp(capsys, "show", path, "nothing*")
    assert (code, out) == (3, "")
    assert err == f"dcp: no name in {path} matches 'nothing*'; `dcp show {path}` lists all\n"


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c")
    code, out, err = dcp(capsys, "verify", path, "--threads", 2)
    assert (code, err) == (0, "")
    assert out.startswith("sound")
    assert "4 items" in out
    flip(data_file(path), 100_000)
    code, out, _ = dcp(capsys, "verify", path)
    assert code == 1
    assert all(text in out for text in ("damaged", "'model.weight'", "1 problem"))
    code, out, _ = dcp(capsys, "verify", path, "--json")
    report = json.loads(out)
    assert (code, report["ok"], report["problems"][0]["key"]) == (1, False, "model.weight")


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c")
    code, out, _ = dcp(capsys, "plan", path, "--world", 4, "--json")
    plan = json.loads(out)
    assert code == 0
    assert [load["needed_bytes"] for load in plan["ranks"]] == [64_008] * 4
    assert sum(load["write_bytes"] for load in plan["ranks"]) == 256_008
    assert all(load["needed_bytes"] <= load["read_bytes"] <= 128_008 for load in plan["ranks"])
    code, out, _ = dcp(capsys, "plan", path, "--world", 2, "--svg", tmp_path / "a.svg", "--html", tmp_path / "a.html")
    assert code == 0
    assert "read by 2 ranks" in out
    assert (tmp_path / "a.svg").read_text().startswith("<svg ")
    assert (tmp_path / "a.svg").read_text().count("model.weight: rank 1") == 1
    assert "<svg " in (tmp_path / "a.html").read_text()


def test_rm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c")
    (path / "mine.txt").write_text("stays")
    code, out, _ = dcp(capsys, "rm", path, "--dry-run")
    assert (code, data_file(path).exists()) == (0, True)
    assert out.startswith("would remove")
    code, out, _ = dcp(capsys, "rm", path, "--yes")
    assert code == 0
    assert [each.name for each in path.iterdir()] == ["mine.txt"]
    code, _, err = dcp(capsys, "rm", path, "--yes")
    assert (code, err) == (3, f"dcp: there is no checkpoint in {path}: it has no .metadata\n")


def test_rm_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    path = write(tmp_path / "c")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert dcp(capsys, "rm", path)[0] == 130
    assert data_file(path).exists()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert dcp(capsys, "rm", path)[0] == 0
    assert not path.exists()


def test_rm_leaves_a_running_save_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c")
    (path / ".dcp-save-0123456789abcdef").write_bytes(b"{}")
    code, _, err = dcp(capsys, "rm", path, "--yes")
    assert code != 0
    assert "a save is writing" in err
    assert dcp(capsys, "rm", path, "--yes", "--force")[0] == 0
    assert not path.exists()


def sign(process: ProcessIdentity) -> str:
    return json.dumps(process.to_dict())


def gone() -> ProcessIdentity:
    return replace(this_process(), pid=2**22 + 1, start_ticks=1)


@pytest.mark.parametrize("name", [".dcp-reading-1", ".dcp-save-0123456789abcdef"])
def test_rm_and_prune_leave_what_is_used_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path, newer = write(tmp_path / "step-1"), write(tmp_path / "step-2")
    marker = {"save_id": "0123456789abcdef", "rank": None, "phase": "saving", "started_ns": 1, "replaced": []}

    def used_by(process: ProcessIdentity) -> None:
        (path / name).write_text(json.dumps({**process.to_dict(), **marker, "process": process.to_dict()}))

    used_by(this_process())
    for command in (("rm", path, "--yes"), ("prune", tmp_path, "--keep", 1, "--yes")):
        code, _, err = dcp(capsys, *command)
        assert (code != 0, name.removeprefix(".dcp-save-") in err) == (True, True)
        assert data_file(path).exists()
    used_by(gone())  # however young it is
    assert dcp(capsys, "prune", tmp_path, "--keep", 1, "--yes")[0] == 0
    assert (path.exists(), newer.exists()) == (False, True)
    assert newer.exists()


def test_rm_and_prune_work_on_a_full_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fill_disk: Callable[[], None]
) -> None:
    for step in (1, 2, 3):
        write(tmp_path / f"step-{step}")
    fill_disk()
    assert dcp(capsys, "prune", tmp_path, "--keep", 2, "--yes")[0] == 0
    assert dcp(capsys, "rm", tmp_path / "step-2", "--yes")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_rm_of_a_link_to_a_checkpoint_removes_the_checkpoint_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "step-1")
    (tmp_path / "last").symlink_to(path)
    code, out, _ = dcp(capsys, "rm", tmp_path / "last", "--yes")
    assert (code, "removed" in out, [*path.iterdir()]) == (0, True, [])
    assert (tmp_path / "last").is_symlink()


def test_rm_looks_again_after_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "c")
    meanwhile: list[Callable[[], object]] = [
        lambda: (path / ".dcp-reading-1").write_text(sign(this_process())),
        lambda: write(path),
    ]
    for happens in meanwhile:
        monkeypatch.setattr("click.confirm", lambda *_, happens=happens, **__: happens())
        code, _, err = dcp(capsys, "rm", path)
        assert code == 4
        assert str(path) in err
        assert data_file(path).exists()
        assert not (path / ".dcp-removing").exists()
        (path / ".dcp-reading-1").unlink(missing_ok=True)


def test_rm_takes_what_the_manager_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c")
    (path / ".dcp-note.json").write_text("{}")
    (path / ".dcp-reading-1").write_text(sign(gone()))
    assert dcp(capsys, "rm", path, "--yes")[0] == 0
    assert not path.exists()


def test_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(1, 6):
        path = write(tmp_path / f"step-{step}")
        os.utime(path / ".metadata", (step, step))
    data_file(tmp_path / "step-5").unlink()
    assert dcp(capsys, "prune", tmp_path, "--keep", 2, "--dry-run")[0] == 0
    assert len(list(tmp_path.iterdir())) == 5
    code, out, _ = dcp(capsys, "prune", tmp_path, "--keep", 2, "--yes", "--json")
    assert code == 0
    assert [Path(each).name for each in json.loads(out)["kept"]] == ["step-4", "step-3"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-3", "step-4", "step-5"]


def made(path: Path, created_ns: int) -> Path:
    """A checkpoint whose save began then, whatever the times of its files."""
    write(path)
    index = index_of(path)
    assert index.info is not None
    index.info = replace(index.info, created_ns=created_ns)
    (path / ".metadata").write_bytes(encode(index))
    return path


PRUNED: dict[str, tuple[dict[str, int], int, set[str], set[str]]] = {
    # what there is and when it was made; how many to keep; what goes; what goes with --force besides
    "by step": ({"step-1": 1, "step-2": 2, "step-10": 3}, 1, {"step-1", "step-2"}, set()),
    "leading zeros": ({"step-1": 1, "step-002": 2}, 1, {"step-1"}, set()),
    "two runs in a folder": ({"a-step-9": 1, "a-step-10": 2, "b-step-1": 3, "step-5": 9}, 1, {"a-step-9"}, set()),
    "two folders": ({"a/step-9": 1, "a/step-10": 2, "b/step-1": 3}, 1, {"a/step-9"}, set()),
    "without a step": ({"step-1": 1, "step-2": 2, "odd": 9, "older": 0}, 1, {"step-1"}, set()),
    "only without a step": ({"a": 1, "b": 2, "seed-1": 3, "seed-2": 4}, 1, set(), set()),
    "other numbers": ({"2024-01-30": 1, "2024-01-31": 2, "rank_0": 3, "rank_1": 4}, 1, set(), set()),
    "went back": ({"step-1": 1, "step-9": 2, "step-2": 3, "step-3": 4}, 1, {"step-1"}, {"step-2", "step-3"}),
    "stock notes no time": ({"step-1": 0, "step-9": 0, "step-2": 0}, 1, {"step-1", "step-2"}, set()),
    "the same step twice": ({"step-7": 2, "step-07": 1}, 1, {"step-07"}, set()),
    "parts of a step": (
        {"checkpoint-1/model": 1, "checkpoint-1/optim": 1, "checkpoint-2/model": 2, "checkpoint-2/optim": 2},
        1,
        {"checkpoint-1/model", "checkpoint-1/optim"},
        set(),
    ),
    "a part of the newest is missing": (
        {"checkpoint-1/model": 1, "checkpoint-1/optim": 1, "checkpoint-2/model": 2},
        1,
        set(),
        set(),
    ),
}


@pytest.mark.parametrize("case", PRUNED)
def test_prune_goes_by_steps_within_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    there, keep, removed, forced = PRUNED[case]
    for number, (name, created_ns) in enumerate(there.items()):
        path = made(tmp_path / name, created_ns)
        os.utime(path / ".metadata", (9000 - number, 9000 - number))  # the first is the youngest file
    for options, gone in (((), removed), (("--force",), removed | forced)):
        _, out, _ = dcp(capsys, "prune", tmp_path, "--keep", keep, *options, "--dry-run", "--json")
        said = json.loads(out)
        assert {os.path.relpath(each, tmp_path) for each in said["checkpoints"]} == gone
        assert set(said["doubtful"]) == (set() if options else {str(tmp_path / name) for name in forced})
    assert dcp(capsys, "prune", tmp_path, "--keep", keep, "--yes")[0] == 0
    left = {os.path.relpath(each.parent, tmp_path) for each in tmp_path.rglob(".metadata")}
    assert left == set(there) - removed


def test_prune_leaves_what_its_note_calls_newer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        write(tmp_path / f"step-{step}")
    (tmp_path / "step-1" / ".dcp-note.json").write_text('{"step": 700}')
    code, out, _ = dcp(capsys, "prune", tmp_path, "--keep", 1, "--yes")
    assert code == 0
    assert "its folder says step 1 and the note in it step 700; --force removes it" in out
    assert (tmp_path / "step-1").exists()
    dcp(capsys, "prune", tmp_path, "--keep", 1, "--yes", "--force")
    assert not (tmp_path / "step-1").exists()


def test_what_was_put_aside_as_damaged_is_not_kept_for_a_good_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        write(tmp_path / f"step-{step}")
    (tmp_path / "step-2" / ".dcp-quarantined.json").write_text('{"reason": "a bit flipped"}')
    _, out, _ = dcp(capsys, "ls", tmp_path)
    assert "put aside as damaged" in out
    assert dcp(capsys, "prune", tmp_path, "--keep", 1, "--yes")[0] == 0
    assert {each.name for each in tmp_path.iterdir()} == {"step-1", "step-2"}


def test_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = dcp(capsys, "plugins", "--json")
    assert code == 0
    for one in json.loads(out):
        assert one["problem"] is None
        assert one["hooks"]
    assert dcp(capsys, "plugins")[0] == 0


class Wrong:
    """Names what is not there."""

    @hookimpl
    def dcp_register_savers(self) -> dict[str, str]:
        return {"gone": "no_such_module_anywhere:Saver"}

    @hookimpl
    def dcp_register_stores(self) -> list[StoreSpec]:
        return [StoreSpec("toy", "io:BytesIO")]


def test_plugins_that_are_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "bad-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[dcp-of-test]\nbad = no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed, "__dict__", vars(PluginRegistry("dcp-of-test")))
    installed.register(Wrong(), name="wrong")
    code, out, _ = dcp(capsys, "plugins", "--json")
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
    assert wrong["hooks"] == ["dcp_register_savers", "dcp_register_stores"]
    code, out, _ = dcp(capsys, "plugins", "--load", "--json")
    assert "no_such_module_anywhere:Saver" in json.loads(out)[1]["problem"]


def test_no_plugins(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "__dict__", vars(PluginRegistry("dcp-of-no-one")))
    code, out, _ = dcp(capsys, "plugins")
    assert (code, out.split("\n")[0].startswith("no installed package")) == (0, True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    code, out, _ = dcp(capsys, "completion", shell)
    assert code == 0
    assert "_DCP_COMPLETE" in out


READERS = [("show",), ("verify",), ("plan", "--world", "2"), ("rm", "--yes")]


@pytest.mark.parametrize("command", READERS, ids=lambda each: each[0])
def test_wrong_paths_give_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "nothing", tmp_path / "empty"):
        code, out, err = dcp(capsys, command[0], place, *command[1:])
        assert code == 3
        said = out + err
        assert str(place) in said.replace("\n", "")
        assert "Traceback" not in said


@pytest.mark.parametrize("command", READERS[:3], ids=lambda each: each[0])
def test_damaged_and_newer_indexes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    path = write(tmp_path / "c")
    whole = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(whole[: len(whole) // 2])
    code, out, err = dcp(capsys, command[0], path, *command[1:])
    assert code == (1 if command[0] == "verify" else 4)
    assert ".metadata" in out + err
    assert "Traceback" not in out + err
    (path / ".metadata").write_bytes(b"")
    code, out, err = dcp(capsys, command[0], path, *command[1:])
    assert code == (1 if command[0] == "verify" else 4)


def test_folder_of_checkpoints_is_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "runs" / "step-1")
    code, _, err = dcp(capsys, "show", tmp_path / "runs")
    assert code == 3
    assert f"`dcp ls {tmp_path / 'runs'}` lists them" in err


def test_wrong_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert dcp(capsys, "nonsense")[0] == 2
    assert dcp(capsys, "plan", tmp_path)[0] == 2
    assert dcp(capsys, "ls", tmp_path / "nothing")[0] == 3
    assert dcp(capsys, "ls", tmp_path)[0] == 3
    code, out, _ = dcp(capsys, "--help")
    assert code == 0
    assert all(f"  {name} " in out for name in COMMANDS)
    assert dcp(capsys, "--version")[0] == 0


WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Refuse())
from dcp_io.testing.damage import flip
from dcp_inspect.cli import run
codes = [run(arguments.split()) for arguments in sys.argv[1:]]
print(codes, any(name.split(".")[0] == "torch" for name in sys.modules))
"""


def test_without_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "c")
    commands = [
        f"ls {tmp_path}",
        f"show {path}",
        f"verify {path}",
        "plugins",
        f"plan {path} --world 2",
        f"cat {path} step",
    ]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *commands], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert ran.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 5] False", ran.stdout
    assert "is not installed: pip install dcp-format" in ran.stderr


def test_module_and_script_are_one(tmp_path: Path) -> None:
    write(tmp_path / "c")
    ran = subprocess.run(
        [sys.executable, "-m", "dcp_inspect", "ls", str(tmp_path)], capture_output=True, text=True, check=True
    )
    script = shutil.which("dcp", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("the script is not installed")
    other = subprocess.run([script, "ls", str(tmp_path)], capture_output=True, text=True, check=True)
    assert "valid" in ran.stdout
    assert ran.stdout.split("age")[0].split() == other.stdout.split("age")[0].split()
    assert "\x1b" not in ran.stdout


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_plans_without_segments_are_the_same(tmp_path: Path, world_size: int) -> None:
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


def test_damage_is_no_wrong_use_of_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dcp_format")
    path = write(tmp_path / "c")
    data = data_file(path)
    content = bytearray(data.read_bytes())
    for at in range(100, len(content), 1000):
        content[at] ^= 1
    data.write_bytes(content)
    code, out, err = dcp(capsys, "cat", path, "model.weight[0:2]")
    assert (code, out) == (4, "")
    assert "'model.weight'" in err

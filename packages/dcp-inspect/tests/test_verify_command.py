"""`dcp verify`: one line for one cause, and whole folders of checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from integration_tests.kits.damage import flip

Dcp = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]
DataFile = Callable[[Path], Path]


def test_verify(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    path = write(tmp_path / "c")
    code, out, err = dcp("verify", path, "--threads", 2)
    assert (code, err) == (0, "")
    assert out.startswith("sound")
    assert "4 items" in out
    flip(data_file(path), 100_000)
    code, out, _ = dcp("verify", path)
    assert code == 1
    assert all(text in out for text in ("damaged", "'model.weight'", "1 problem"))
    code, out, _ = dcp("verify", path, "--json")
    report = json.loads(out)
    assert (code, report["ok"], report["problems"][0]["key"]) == (1, False, "model.weight")


def test_verify_says_one_line_for_one_cause(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    path = write(tmp_path / "c")
    data = data_file(path)
    size = data.stat().st_size
    os.truncate(data, 1000)
    code, out, _ = dcp("verify", path)
    said = out.splitlines()
    assert code == 1
    assert said[0].startswith(f"damaged     {path}: 1 problem; 4 items, ")
    assert f"the file ends at 1,000 of {size:,} bytes; 4 items are lost: " in said[1]
    assert all(repr(name) in said[1] for name in ("model.weight", "step", "note"))
    assert said[2].startswith(f"load an earlier checkpoint (`dcp ls {tmp_path}` shows them)")
    (problem,) = json.loads(dcp("verify", path, "--json")[1])["problems"]
    assert set(problem["lost_keys"]) == {"model.weight", "step", "note"}
    data.unlink()
    said = dcp("verify", path)[1].splitlines()
    assert len(said) == 3
    assert "4 items are lost" in said[1]


def test_verify_groups_the_damage_of_a_file(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    path = write(tmp_path / "c")
    data = data_file(path)
    content = bytearray(data.read_bytes())
    for at in range(1000, len(content), 20_000):
        content[at] ^= 1
    data.write_bytes(content)
    out = dcp("verify", path)[1]
    assert out.count("the stored data differ from what was written") == 1
    assert "in 2 places: 'model.weight'" in out


def test_verify_of_a_folder_of_checkpoints(tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile) -> None:
    runs = tmp_path / "runs"
    for step in (1, 2, 3):
        write(runs / "a" / f"step-{step}")
    write(runs / "b" / "step-1")
    (runs / "a" / "step-3" / ".metadata").unlink()
    (runs / "a" / "export.safetensors").write_bytes(b"")
    for place in (runs, runs / "a"):
        code, out, err = dcp("verify", place)
        assert (code, out) == (3, "")
        assert "damaged" not in err
        assert f"`dcp verify -r {place}` checks" in err
        assert dcp("show", place)[2] == err  # not the stray file
    code, out, err = dcp("verify", "-r", runs)
    assert (code, err) == (0, "")
    assert out.count("sound    ") == 3
    assert f"unfinished  {runs / 'a' / 'step-3'}" in out
    assert out.splitlines()[-1].startswith("3 of 3 checkpoints sound; ")
    flip(data_file(runs / "b" / "step-1"), 100_000)
    code, out, _ = dcp("verify", "--recursive", runs, "--json")
    report = json.loads(out)
    assert (code, report["ok"], len(report["unfinished"])) == (1, False, 1)
    assert [Path(each["path"]).parent.name for each in report["checkpoints"] if not each["ok"]] == ["b"]
    assert [each["state"] for each in report["checkpoints"]] == ["damaged", "sound", "sound"]
    assert dcp("verify", "-r", tmp_path / "nothing")[0] == 3
    (tmp_path / "empty").mkdir()
    assert dcp("verify", "-r", tmp_path / "empty")[0] == 3

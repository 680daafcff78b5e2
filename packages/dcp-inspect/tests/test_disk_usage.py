"""`dcp du`: bytes by checkpoint, run and part, each link of a file counted once, and what policies would free."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Dcp = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]


def bytes_below(folder: Path) -> int:
    """Each file once, as the disk holds it."""
    facts = [path.stat() for path in folder.rglob("*") if path.is_file() and path.suffix != ".txt"]
    return sum({fact.st_ino: fact.st_size for fact in facts}.values())


def used(dcp: Dcp, *arguments: object) -> Any:
    code, out, _ = dcp("du", *arguments, "--json")
    assert code == 0
    return json.loads(out)


def test_du_says_parts_and_policies(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    for step in (10, 20, 30):
        write(tmp_path / f"step-{step}")
    (tmp_path / "step-10" / "notes.txt").write_text("not counted, since no save wrote it")
    code, out, err = dcp("du", tmp_path, "--keep", "KeepLast(1) | KeepEvery(20)", "--depth", 1)
    assert (code, err) == (0, "")
    said = used(dcp, tmp_path, "--keep", "KeepLast(1) | KeepEvery(20)", "--depth", 1)
    assert said["bytes"] == bytes_below(tmp_path)
    assert 0 <= said["parts"]["model"] - 3 * 4000 * 16 * 4 < 4096  # and the frames of three archives
    assert sum(said["parts"].values()) == said["bytes"]
    policy = said["policies"]["KeepLast(1) | KeepEvery(20)"]
    assert policy == {"removes": [str(tmp_path / "step-10")], "frees_bytes": bytes_below(tmp_path / "step-10")}
    assert "KeepLast(1) | KeepEvery(20)        1" in out


@pytest.mark.parametrize("parts", [["model"], ["model", "modle"]])
def test_du_frees_no_parts_that_a_manager_would_keep(tmp_path: Path, dcp: Dcp, write: Write, parts: list[str]) -> None:
    """None of files on several hosts, and none if one of the parts is unknown."""
    for step in (10, 20):
        write(tmp_path / f"step-{step}")
    policy = f"KeepLast(1) | KeepAll(parts={parts!r})"
    freed = [used(dcp, place, "--keep", policy)["policies"] for place in (tmp_path, f"host://{tmp_path}")]
    whole = {policy: {"removes": [], "frees_bytes": 0}}
    assert freed == [whole | ({} if len(parts) > 1 else {policy: {"removes": [], "frees_bytes": 466}}), whole]


@pytest.mark.parametrize("seed", range(5))
def test_own_bytes_are_what_a_removal_frees(tmp_path: Path, seed: int, dcp: Dcp, write: Write) -> None:
    """Files are linked at random between checkpoints, within one, and to a place outside."""
    rng = random.Random(seed)
    folders = [write(tmp_path / run / f"step-{step}", rows=20 * step) for run in "ab" for step in (10, 20, 30)]
    outside = tmp_path.with_name(f"{tmp_path.name}-outside")
    outside.mkdir()
    for number in range(8):
        file = rng.choice([*rng.choice(folders).glob("*.distcp")])
        folder = rng.choice([*folders, outside])
        (folder / f"__0_{number}_linked.distcp").hardlink_to(file)
    for run in (tmp_path, tmp_path / "a"):
        said = used(dcp, run, "--keep", "KeepLast(1)", "--keep", "KeepLast(2)")
        assert said["bytes"] == bytes_below(run)
        for one in said["checkpoints"]:
            assert one["own_bytes"] == freed(tmp_path, outside, [one["path"]])
            assert sum(one["parts"].values()) == one["bytes"]
        for policy in said["policies"].values():
            assert policy["frees_bytes"] == freed(tmp_path, outside, policy["removes"])
        assert len(said["policies"]["KeepLast(1)"]["removes"]) == (4 if run == tmp_path else 2)
    shutil.rmtree(outside)


def freed(folder: Path, outside: Path, removed: list[str]) -> int:
    """What is no longer there if these folders go, by the inodes of all that is left."""
    everything = [path for place in (folder, outside) for path in place.rglob("*") if path.is_file()]
    left = {path.stat().st_ino for path in everything if not any(str(path).startswith(f"{one}/") for one in removed)}
    return sum(
        {path.stat().st_ino: path.stat().st_size for path in everything if path.stat().st_ino not in left}.values()
    )


def test_the_newest_and_what_is_incomplete_stays(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    for step in (10, 20, 30):
        write(tmp_path / f"step-{step}")
    write(tmp_path / "final")
    (tmp_path / "step-10" / ".metadata").write_bytes(b"damaged")
    said = used(dcp, tmp_path, "--keep", "KeepEvery(7)")
    assert said["policies"]["KeepEvery(7)"]["removes"] == [str(tmp_path / "step-20")]
    assert {one["path"]: one["problem"] is None for one in said["checkpoints"]} == {
        str(tmp_path / name): name != "step-10" for name in ("step-10", "step-20", "step-30", "final")
    }


def test_du_of_what_is_not_there_or_unreadable(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    assert dcp("du", tmp_path)[0] == 3
    code, _, err = dcp("du", tmp_path, "--keep", "3")
    assert code == 2
    assert "'3' is not a policy" in err
    write(tmp_path / "step-1")
    (tmp_path / "step-2").mkdir(mode=0)
    if not os.access(tmp_path / "step-2", os.R_OK):
        assert dcp("du", tmp_path)[0] == 4


def test_symbolic_links_free_nothing(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    """As in the cache of the Hugging Face hub."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0a"
    snapshot.mkdir(parents=True)
    write(tmp_path / "step-1").rename(blobs)
    for number, path in enumerate([*blobs.iterdir()]):
        path.rename(blobs / f"blob-{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{number}")
    said = used(dcp, snapshot)
    assert said["checkpoints"][0]["own_bytes"] == 0
    assert said["bytes"] == bytes_below(blobs)

"""Saves without an index: what `ls`, `show` and `rm` say about them, and that all of it agrees."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dcp_io import STALE_AFTER_SECONDS
from dcp_io.saves.save_files import this_process

Dcp = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]
DataFile = Callable[[Path], Path]


@pytest.fixture
def left(tmp_path: Path, write: Write, data_file: DataFile) -> Callable[[float], Path]:
    """Leave a save without an index and without a marker, last written so many seconds ago."""

    def left(seconds: float) -> Path:
        path = write(tmp_path / "step-1")
        (path / ".metadata").unlink()
        os.utime(data_file(path), (time.time() - seconds,) * 2)
        return path

    return left


def test_a_young_one_is_removed_after_an_hour_or_by_force(left: Callable[[float], Path], dcp: Dcp) -> None:
    path = left(130)
    state = json.loads(dcp("ls", path.parent, "--json")[1])[0]["problem"]
    assert state == (
        "unfinished, or being saved: newest file written 2 min ago; `dcp rm` removes it after 1 h without a write, "
        "`dcp rm --force` at once"
    )
    code, _, err = dcp("show", path)
    assert code == 3
    assert "its newest file was written 2 min ago, so a save may still be running; " in err
    assert f"`dcp rm {path}` removes what it left after 1 h without a write, `dcp rm --force {path}` at once" in err
    code, out, err = dcp("rm", path, "--yes")
    assert (code, out) == (4, "")
    assert "its newest file was written 2 min ago" in err
    assert "wait until nothing has been written for 1 h, or use rm --force" in err
    assert dcp("rm", path, "--yes", "--force")[0] == 0
    assert not path.exists()


def test_an_old_one_is_removed_at_once(left: Callable[[float], Path], dcp: Dcp) -> None:
    path = left(STALE_AFTER_SECONDS + 60)
    assert "no live save; `dcp rm` removes it" in dcp("ls", path.parent)[1]
    assert dcp("show", path)[2].endswith(f"no save is running; `dcp rm {path}` removes what it left\n")
    code, out, _ = dcp("rm", path, "--dry-run", "--json")
    assert (code, json.loads(out)["refusal"]) == (0, None)
    assert dcp("rm", path, "--yes")[0] == 0
    assert not path.exists()


def test_one_that_runs(left: Callable[[float], Path], dcp: Dcp) -> None:
    path = left(STALE_AFTER_SECONDS + 60)
    marker = {"save_id": "0123456789abcdef", "rank": None, "phase": "saving", "started_ns": 1, "replaced": []}
    process = this_process().to_dict()
    (path / ".dcp-save-0123456789abcdef").write_text(json.dumps({**marker, "process": process}))
    assert "being saved: save 0123456789abcdef of process" in dcp("ls", path.parent)[1]
    said = dcp("show", path)[2]
    assert "a save is writing to it (save 0123456789abcdef of process" in said
    assert f"`dcp rm {path}` removes what it left when the save has ended" in said
    assert dcp("rm", path, "--yes")[0] == 4


def test_a_dry_run_is_not_refused(
    left: Callable[[float], Path], tmp_path: Path, dcp: Dcp, write: Write, data_file: DataFile
) -> None:
    path, damaged, saved = left(10), write(tmp_path / "damaged"), write(tmp_path / "saved")
    (damaged / ".metadata").write_bytes((damaged / ".metadata").read_bytes()[:-40])
    (saved / ".dcp-save-0123456789abcdef").write_bytes(b"{}")
    for place, reason in ((path, "may still be running"), (damaged, "manifest"), (saved, "a save is writing to")):
        before = sorted(place.iterdir())
        code, out, err = dcp("rm", place, "--dry-run")
        assert (code, err) == (0, "")
        first, second = out.splitlines()
        assert first.startswith(f"would remove {place}: ")
        assert second.startswith("with --force only: ")
        assert reason in second
        said = json.loads(dcp("rm", place, "--dry-run", "--json")[1])
        assert (said["removed"], reason in said["refusal"]) == (False, True)
        assert set(said["files"]) <= {each.name for each in before}
        assert data_file(place).name in said["files"]
        assert "--force only" not in dcp("rm", place, "--dry-run", "--force")[1]
        assert sorted(place.iterdir()) == before
        assert dcp("rm", place, "--yes")[0] == 4
    assert dcp("rm", tmp_path / "nothing", "--dry-run")[0] == 3


def test_a_dry_run_of_prune_says_what_would_refuse_it(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    for step in (1, 2):
        write(tmp_path / f"step-{step}")
    (tmp_path / "step-1" / ".dcp-save-0123456789abcdef").write_bytes(b"{}")
    code, out, err = dcp("prune", tmp_path, "--keep", 1, "--dry-run")
    assert (code, err) == (0, "")
    assert f"refused as it is, and nothing removed: a save is writing to {tmp_path / 'step-1'}" in out
    said = json.loads(dcp("prune", tmp_path, "--keep", 1, "--dry-run", "--json")[1])
    assert [*said["refusals"]] == said["checkpoints"] == [str(tmp_path / "step-1")]
    assert dcp("prune", tmp_path, "--keep", 1, "--yes")[0] == 4


def test_ls_and_rm_count_the_same_bytes(tmp_path: Path, dcp: Dcp, write: Write) -> None:
    path = write(tmp_path / "step-1")
    (listed,) = json.loads(dcp("ls", tmp_path, "--json")[1])
    removed = json.loads(dcp("rm", path, "--dry-run", "--json")[1])
    assert listed["bytes"] == removed["bytes"] == sum(each.stat().st_size for each in path.iterdir())

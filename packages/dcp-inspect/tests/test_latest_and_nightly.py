"""`dcp latest`, nightly runs of `dcp verify`, quarantines and metrics: what operators ask at three in the morning."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_io import LocalStore, verify_checkpoint
from dcp_io.roots.catalogue import Catalogue
from integration_tests.kits.damage import flip

Dcp = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]
DataFile = Callable[[Path], Path]


@pytest.fixture
def run(tmp_path: Path, write: Write, data_file: DataFile) -> Path:
    """A run whose newest step is cut, the one before it has a flipped byte, and the one before that is quarantined."""
    root = tmp_path / "run"
    for step in (1, 2, 3, 4):
        write(root / f"step-{step}")
    os.truncate(data_file(root / "step-4"), 100)
    flip(data_file(root / "step-3"), 100_000)
    Catalogue(LocalStore(root), stale_after_seconds=60).quarantine(2, "the loss is NaN")
    (root / "step-1" / ".dcp-note.json").write_text(
        json.dumps({"step": 1, "created": 1.0, "metrics": {"val_loss": 0.25, "acc": 0.5}, "process": None})
    )
    return root


def test_latest_prints_the_path_alone(run: Path, dcp: Dcp) -> None:
    code, out, err = dcp("latest", run)
    assert (code, out) == (0, f"{run}/step-3\n")
    assert ("step-4" in err, "of 2" in err) == (True, True)
    code, out, err = dcp("latest", run, "--deep")
    assert (code, out) == (0, f"{run}/step-1\n")
    assert [line.split(":")[0].rpartition("/")[2] for line in err.splitlines()] == ["step-4", "step-3", "step-2"]
    code, out, _ = dcp("latest", run, "--deep", "--json")
    found = json.loads(out)
    assert (code, found["path"], found["sound"], len(found["passed_over"])) == (0, f"{run}/step-1", True, 3)


def test_latest_without_a_checkpoint(tmp_path: Path, run: Path, dcp: Dcp, data_file: DataFile) -> None:
    flip(data_file(run / "step-1"), 100_000)
    assert dcp("latest", run, "--deep")[:2] == (3, "")
    (tmp_path / "empty").mkdir()
    for arguments in ((tmp_path / "empty",), (tmp_path / "nowhere",), (tmp_path / "empty", "--json")):
        assert dcp("latest", *arguments)[0] == 3


def test_a_parent_folder_names_the_newest_complete_one(run: Path, dcp: Dcp) -> None:
    for command in ("show", "verify"):
        assert f"the newest complete one is {run}/step-3" in dcp(command, run)[2]


def test_metrics_and_quarantines_are_shown(run: Path, dcp: Dcp) -> None:
    code, out, _ = dcp("ls", run)
    assert (code, "val_loss=0.25 acc=0.5" in out, "ago: the loss is NaN" in out) == (0, True, True)
    by_step = {each["step"]: each for each in json.loads(dcp("ls", run, "--json")[1])}
    assert by_step[1]["metrics"] == {"val_loss": 0.25, "acc": 0.5}
    assert by_step[2]["quarantine"]["reason"] == "the loss is NaN"
    assert abs(by_step[2]["quarantine"]["found_seconds"] - time.time()) < 3600
    assert (by_step[1]["quarantine"], by_step[1]["complete"], by_step[2]["complete"]) == (None, True, False)
    code, out, _ = dcp("show", run / "step-1", run / "step-2")
    assert ("metrics: val_loss=0.25" in out, "dcp unquarantine" in out, out.count("2 tensors")) == (True, True, 2)
    shown = json.loads(dcp("show", run / "step-1", run / "step-2", "--json")[1])["checkpoints"]
    assert [each["metrics"] for each in shown] == [by_step[1]["metrics"], {}]
    assert shown[1]["quarantine"]["reason"] == "the loss is NaN"


def test_a_quarantine_is_lifted_if_the_checkpoint_is_sound(run: Path, dcp: Dcp, data_file: DataFile) -> None:
    flip(data_file(run / "step-2"), 100_000)
    code, out, _ = dcp("unquarantine", run / "step-2")
    assert (code, "stays quarantined" in out, "lifts it" in dcp("verify", run / "step-2")[1]) == (1, True, False)
    flip(data_file(run / "step-2"), 100_000)
    code, out, _ = dcp("verify", run / "step-2")
    assert (code, f"quarantined: `dcp unquarantine {run / 'step-2'}` lifts it" in out) == (0, True)
    code, out, _ = dcp("unquarantine", run / "step-2", "--json")
    assert (code, json.loads(out)["lifted"], json.loads(out)["reason"]) == (0, True, "the loss is NaN")
    assert not (run / "step-2" / ".dcp-quarantined.json").exists()
    assert dcp("unquarantine", run / "step-2")[0] == 3
    assert Catalogue(LocalStore(run), stale_after_seconds=60).is_good(2)


def test_several_paths(run: Path, dcp: Dcp) -> None:
    code, out, _ = dcp("verify", *(run / f"step-{step}" for step in (1, 3, 9)), "--json")
    assert (code, [each["state"] for each in json.loads(out)["checkpoints"]]) == (3, ["sound", "damaged", "unreadable"])
    code, out, err = dcp("rm", run / "step-9", run / "step-3", run / "step-4", "--yes")
    assert (code, "step-9" in err, out.count("removed")) == (3, True, 2)  # damaged data need no --force
    assert sorted(path.name for path in run.iterdir()) == ["step-1", "step-2"]
    code, out, _ = dcp("rm", run / "step-1", run / "step-1", "--yes", "--json")
    assert (code, len(json.loads(out)["checkpoints"])) == (0, 1)


def nightly(dcp: Dcp, *arguments: object) -> tuple[int, dict[str, str]]:
    code, out, _ = dcp("verify", "-r", *arguments, "--json-lines")
    found: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    return code, {os.path.basename(each["path"]): each["state"] for each in found}


def test_a_nightly_run_reads_only_what_is_new(tmp_path: Path, run: Path, dcp: Dcp, write: Write) -> None:
    state = tmp_path / "state.json"
    first = {"step-4": "damaged", "step-3": "damaged", "step-2": "sound", "step-1": "sound"}
    assert nightly(dcp, run, "--skip-verified", state) == (1, first)
    second = {**first, "step-2": "skipped", "step-1": "skipped"}
    assert nightly(dcp, run, "--skip-verified", state) == (1, second)
    write(run / "step-1")  # another save of the same step
    assert nightly(dcp, run, "--skip-verified", state) == (1, {**second, "step-1": "sound"})
    (data,) = (run / "step-2").glob("*.distcp")
    os.truncate(data, 100)  # the index is the same, and the file is not
    assert nightly(dcp, run, "--skip-verified", state)[1]["step-2"] == "damaged"
    assert nightly(dcp, run, "--skip-verified", state)[1]["step-2"] == "damaged"
    assert [*json.loads(state.read_text())["checkpoints"]] == [str(run / "step-1")]
    assert [path.name for path in tmp_path.iterdir() if "state" in path.name] == ["state.json"]


def test_since(run: Path, dcp: Dcp) -> None:
    old = time.time() - 3 * 86400
    for step in (1, 2):
        index = run / f"step-{step}" / ".metadata"
        os.utime(index, (old, old))
    assert set(nightly(dcp, run, "--since", "1d")[1]) == {"step-3", "step-4"}
    assert set(nightly(dcp, run, "--since", "2w")[1]) == {"step-1", "step-2", "step-3", "step-4"}


def test_a_rate_is_kept(run: Path, dcp: Dcp) -> None:
    begun = time.monotonic()
    assert dcp("verify", run / "step-1", "--rate", "500KB/s")[0] == 0  # some 250 KiB
    assert time.monotonic() - begun > 0.3


def test_another_file_is_not_overwritten_by_the_state(tmp_path: Path, run: Path, dcp: Dcp) -> None:
    for content in ("{}", "[]", "text", '{"format": "dcp-verified/9", "checkpoints": {}}'):
        (tmp_path / "mine").write_text(content)
        assert dcp("verify", "-r", run, "--skip-verified", tmp_path / "mine")[0] == 2
        assert (tmp_path / "mine").read_text() == content


def test_a_state_that_cannot_be_written_is_said_before_anything_is_read(tmp_path: Path, run: Path, dcp: Dcp) -> None:
    code, out, err = dcp("verify", "-r", run, "--skip-verified", tmp_path / "missing" / "state.json")
    assert (code, out) == (2, "")
    assert "missing/state.json cannot be written: No such file or directory" in err


@pytest.mark.parametrize("form", ["--json", "--json-lines"])
def test_results_are_printed_if_their_state_cannot_be_written(
    tmp_path: Path, run: Path, dcp: Dcp, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[str] = []
    replace = os.replace

    def full(source: str, target: str) -> None:
        writes.append(target)
        if len(writes) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("dcp_inspect.commands.verify._WRITE_SECONDS", -1)  # after each checkpoint
    monkeypatch.setattr(os, "replace", full)
    state = tmp_path / "state.json"
    code, out, err = dcp("verify", run / "step-1", "--skip-verified", state, form)
    assert (code, json.loads(out)["state"]) == (4, "sound")
    assert f"{state} cannot be written: No space left on device" in err
    assert len(writes) > 2
    assert [path.name for path in tmp_path.iterdir() if "state" in path.name] == ["state.json"]


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_damaged(
    run: Path, dcp: Dcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(store: LocalStore, **options: Any) -> Any:
        if str(store.path).endswith("step-1"):
            Catalogue(LocalStore(run), stale_after_seconds=60).remove(1)
        return verify_checkpoint(store, **options)

    monkeypatch.setattr("dcp_inspect.commands.verify.verify_checkpoint", meanwhile)
    code, states = nightly(dcp, run / "step-1")
    assert (code, states) == (0, {"step-1": "unfinished"})


def test_diff_goes_on_after_damage(run: Path, dcp: Dcp) -> None:
    code, out, _ = dcp("diff", run / "step-1", run / "step-3", "--json")
    found = {each["name"]: each for each in json.loads(out)["differences"]}
    assert (code, found["model.weight"]["what"]) == (4, "damaged")
    assert found["model.weight"]["b"].startswith(f"{run}/step-3: ")
    assert "step" not in found
    code, out, _ = dcp("diff", run / "step-3", run / "step-1")
    assert (code, "damaged" in out, f"{run}/step-3: " in out) == (4, True, True)


def test_statistics_go_on_after_damage(run: Path, dcp: Dcp) -> None:
    code, out, _ = dcp("show", run / "step-3", "--stats", "--json")
    values = {each["name"]: each for each in json.loads(out)["values"]}
    assert (code, "stats" in values["step"], f"{run}/step-3: " in values["model.weight"]["damage"]) == (1, True, True)


def test_convert_names_the_damaged_checkpoint(tmp_path: Path, run: Path, dcp: Dcp) -> None:
    pytest.importorskip("dcp_format")
    code, _, err = dcp("convert", run / "step-3", tmp_path / "out.pt", "--include", "model.*")
    assert (code, f"{run}/step-3" in err) == (4, True)

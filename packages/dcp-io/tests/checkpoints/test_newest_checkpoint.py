"""The newest checkpoint that can be loaded, over any store."""

from __future__ import annotations

import os
import time

import pytest

from dcp_io import LocalStore, find_checkpoints, latest_valid
from dcp_io.checkpoints.list_checkpoints import check_checkpoint
from dcp_manifest import LocalFolder, checkpoints_below
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from integration_tests.kits.damage import flip

VALUES = [{"a": bytes(100_000)}, {"b": b"1" * 500}]


@pytest.fixture
def root(tmp_path, helpers):
    """Two checkpoints, `new` and, ten seconds older, `deep/old`."""
    now = time.time()
    for age, name in enumerate(("new", "deep/old")):
        store = LocalStore(tmp_path / name)
        helpers.save_all(store, VALUES)
        then = now - 10 * age
        os.utime(tmp_path / name / ".metadata", (then, then))
    return tmp_path


def data_file(folder):
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def test_the_newest_is_found(root):
    for place in (root, str(root), f"file://{root}", LocalStore(root)):
        for deep in (False, True):
            found = latest_valid(place, deep=deep)
            assert found.path == root / "new"
            assert found.modified_seconds > latest_valid(root / "deep").modified_seconds


def test_there_may_be_none(tmp_path):
    assert latest_valid(tmp_path) is None
    assert latest_valid(tmp_path / "nowhere", deep=True) is None


@pytest.mark.parametrize("damage", ["no index", "damaged index", "no file", "short file"])
def test_what_cannot_be_loaded_is_passed_over(root, damage):
    folder = root / "new"
    if damage == "no index":
        (folder / ".metadata").unlink()
    elif damage == "damaged index":
        data = (folder / ".metadata").read_bytes()
        (folder / ".metadata").write_bytes(data[:-1])
    elif damage == "no file":
        data_file(folder).unlink()
    else:
        os.truncate(data_file(folder), 70_000)
    assert latest_valid(root).path == root / "deep" / "old"
    with pytest.raises(
        (CheckpointNotFoundError, CorruptCheckpointError), match=r"no complete index|\.metadata|\.distcp"
    ):
        check_checkpoint(LocalStore(folder))


def test_damaged_bytes_are_found_if_asked_for(root):
    path = data_file(root / "new")
    flip(path, 50_000)
    assert latest_valid(root).path == root / "new"
    assert latest_valid(root, deep=True).path == root / "deep" / "old"
    check_checkpoint(LocalStore(root / "new"))
    with pytest.raises(CorruptCheckpointError, match=path.name) as caught:
        check_checkpoint(LocalStore(root / "new"), deep=True)
    assert caught.value.key == "a"


def test_only_folders_of_the_file_system_have_a_path(root):
    found = latest_valid(root)

    class Other:
        url = "memory://x"

    with pytest.raises(TypeError, match="memory://x"):
        _ = type(found)(Other(), 0.0).path


@pytest.fixture
def copied(tmp_path, helpers):
    """Two checkpoints with a step and one without; the oldest was copied last, so its files are the newest."""
    names = ["step-100", "step-500", "odd"]
    for number, name in enumerate(names):
        helpers.save_all(LocalStore(tmp_path / name), VALUES)
        os.utime(tmp_path / name / ".metadata", (5000 - number, 5000 - number))
    return tmp_path


def test_stores_and_paths_agree_on_the_order(copied):
    expected = ["step-500", "step-100", "odd"]
    for found in (
        find_checkpoints(copied),
        find_checkpoints(f"file://{copied}"),
        checkpoints_below(LocalFolder(copied)),
    ):
        assert [one.path.name for one in found] == expected
        assert [one.step for one in found] == [500, 100, None]
    assert latest_valid(copied).path.name == "step-500"
    (copied / "step-500" / ".dcp-quarantined.json").write_text("{}")
    assert latest_valid(copied).path.name == "step-100"


def test_links_to_data_files_within_a_checkpoint_are_whole(copied):
    data = data_file(copied / "step-500")
    data.rename(data.with_name("moved.bin"))
    data.symlink_to("moved.bin")
    check_checkpoint(LocalStore(copied / "step-500"))
    assert latest_valid(copied).path.name == "step-500"

from __future__ import annotations

import json
import os
import shutil
import socket

import pytest

from dcp_manifest import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LocalFolder,
    UnsafeCheckpointError,
    checkpoints_below,
    index_of,
)
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.folders.find_checkpoints import check_files, first_valid
from dcp_manifest.index.columns import ManifestInfo, needed_bytes


def find_checkpoints(root):
    return checkpoints_below(LocalFolder(root))


def latest_valid(root):
    return first_valid(find_checkpoints(root), lambda one: check_files(one.store, index_of(one.store)))


@pytest.fixture
def save(make_index, tmp_path):
    """Makes a checkpoint of one tensor in a folder below the root."""

    def make(name, mtime, *, file_bytes=12, created_ns=0):
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        index = make_index(
            [("w", 0, 0, 0, (1,), [((0,), (1,))])],
            chunk_rows=[(0, 8, 0, 4, 0, 0, 0, 1)],
            dtypes=("float32",),
            files=("sub/a.distcp",),
            info=ManifestInfo(name, 1, "t", created_ns=created_ns),
        )
        (folder / "sub" / "a.distcp").write_bytes(bytes(file_bytes))
        (folder / ".metadata").write_bytes(encode(index))
        os.utime(folder / ".metadata", (mtime, mtime))
        return folder

    return make


def test_newest_first_and_nested(save, tmp_path):
    save("run/step-1", 100)
    save("run/step-2", 300)
    save("run/step-2/extra", 200)
    (tmp_path / "run" / "logs").mkdir()
    found = find_checkpoints(tmp_path)
    assert [entry.path.relative_to(tmp_path).as_posix() for entry in found] == [
        "run/step-2",
        "run/step-2/extra",
        "run/step-1",
    ]
    assert [entry.modified_seconds for entry in found] == [300, 200, 100]
    assert find_checkpoints(tmp_path / "run" / "step-1")[0].path == tmp_path / "run" / "step-1"


def order(root):
    return [one.path.relative_to(root).as_posix() for one in find_checkpoints(root)]


ORDERS = {
    "a copy with other times": [("step-500", 100, 5), ("step-100", 900, 1)],
    "a clock that went back": [("step-500", 100, 1), ("step-100", 900, 5)],
    "stock, which notes no time": [("step-500", 100, 0), ("step-100", 900, 0)],
    "numbers, not letters": [("step-1000", 1, 1), ("step-999", 1, 1)],
    "20 digits": [("step-99999999999999999999", 1, 1), ("step-9223372036854775807", 9, 9)],
    "leading zeros": [("step-0000101", 1, 1), ("step-100", 9, 9)],
    "mixed names": [("checkpoint-30", 1, 1), ("epoch=0-step=25.ckpt", 9, 9), ("step-20", 5, 5), ("global_step7", 7, 7)],
    "the same step twice": [("step-500", 1, 5), ("step-0500", 9, 4)],
    "the same step twice, and no time noted": [("step-0500", 9, 0), ("step-500", 1, 0)],
    "within one tick": [("step-2", 5, 5), ("step-1", 5, 5)],
    "without a step beside those with": [("step-5", 1, 1), ("step-4", 2, 2), ("odd", 9, 9), ("even", 9, 8)],
    "none has a step": [("b", 1, 3), ("c", 9, 2), ("a", 5, 1)],
    "parts of a step": [("checkpoint-2/model", 1, 3), ("checkpoint-2/optim", 1, 2), ("checkpoint-1/model", 9, 1)],
    "another run beside": [("b/step-1", 1, 9), ("a/step-900", 9, 5), ("a/step-800", 9, 6)],
    "another run below": [("step-3", 1, 1), ("old/step-900", 9, 9)],
}


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_is_by_step_then_by_when_it_was_made(save, tmp_path, case):
    """Each case is (folder, modification time, creation time), newest first."""
    for name, mtime, created_ns in ORDERS[case]:
        save(name, mtime, created_ns=created_ns)
    names = [name for name, *_ in ORDERS[case]]
    assert order(tmp_path) == names
    assert latest_valid(tmp_path).path == tmp_path / names[0]


def test_a_copy_is_ordered_as_the_original(save, tmp_path):
    run = tmp_path / "run"
    for number, name in enumerate(["step-1", "step-20", "step-3", "best", "final"]):
        save(f"run/{name}", 100 + number, created_ns=1000 + number)
    for number, name in enumerate(sorted(path.name for path in run.iterdir())):  # as a copy by name leaves them
        os.utime(run / name / ".metadata", (900 - number, 900 - number))
    assert order(run) == ["step-20", "step-3", "step-1", "final", "best"]


def test_a_note_gives_the_step_that_the_name_does_not(save, tmp_path):
    for name, step in (("best", 30), ("step-20", 99), ("other", "30")):
        (save(name, 1) / ".dcp-note.json").write_text(json.dumps({"step": step}))
    (save("wild", 9) / ".dcp-note.json").write_text("[" * 100_000)
    (save("wide", 8) / ".dcp-note.json").write_bytes(b" " * 2_000_000 + b'{"step": 100}')
    assert order(tmp_path) == ["best", "step-20", "wild", "wide", "other"]
    assert [one.step for one in find_checkpoints(tmp_path)] == [30, 20, None, None, None]
    assert find_checkpoints(tmp_path / "best")[0].step == 30
    assert find_checkpoints(tmp_path / "step-20")[0].step == 20


@pytest.mark.parametrize("sign", [".dcp-quarantined.json", ".dcp-removing"])
def test_what_was_put_aside_is_not_the_latest_valid(save, tmp_path, sign):
    for step in (1, 2):
        save(f"step-{step}", step)
    (tmp_path / "step-2" / sign).write_text("{}")
    assert order(tmp_path) == ["step-2", "step-1"]
    assert sign in find_checkpoints(tmp_path)[0].put_aside
    assert latest_valid(tmp_path).path == tmp_path / "step-1"


def test_links_are_not_followed_but_the_root_may_be_one(save, tmp_path):
    save("run/step-1", 1)
    save("other/step-9", 9)
    (tmp_path / "run" / "step-100").symlink_to(tmp_path / "other" / "step-9")
    (tmp_path / "run" / "step-200").symlink_to("step-200")
    assert order(tmp_path / "run") == ["step-1"]
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert latest_valid(tmp_path / "link").step == 1


def test_data_files_may_be_links(save, tmp_path):
    folder = save("step-1", 1)
    (folder / "sub" / "a.distcp").rename(folder / "b.distcp")
    (folder / "sub" / "a.distcp").symlink_to(folder / "b.distcp")
    assert latest_valid(tmp_path).step == 1


def test_a_folder_that_may_not_be_listed_is_passed_over(save, tmp_path, monkeypatch):
    save("step-1", 1)
    (tmp_path / "lost+found").mkdir()
    real = os.scandir

    def scandir(path):
        if str(path).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert order(tmp_path) == ["step-1"]
    with pytest.raises(PermissionError):
        find_checkpoints(tmp_path / "lost+found")


def test_no_root_no_checkpoints(tmp_path):
    assert find_checkpoints(tmp_path / "nowhere") == []
    assert latest_valid(tmp_path / "nowhere") is None


def damage(folder, kind):
    if kind == "index":
        data = (folder / ".metadata").read_bytes()
        (folder / ".metadata").write_bytes(data[:-1])
    elif kind == "missing":
        (folder / "sub" / "a.distcp").unlink()
    elif kind == "short":
        (folder / "sub" / "a.distcp").write_bytes(bytes(11))
    elif kind == "foreign":
        (folder / ".metadata").write_bytes(b"something else")
    elif kind == "folder":
        (folder / ".metadata").unlink()
        (folder / ".metadata").mkdir()
    elif kind == "data is a folder":
        (folder / "sub" / "a.distcp").unlink()
        (folder / "sub" / "a.distcp").mkdir()
        os.utime(folder / ".metadata", (300, 300))


@pytest.mark.parametrize("kind", ["index", "missing", "short", "foreign", "folder"])
def test_the_latest_valid_passes_over_what_is_damaged(save, tmp_path, kind):
    save("old", 100)
    good = save("good", 200)
    newest = save("newest", 300)
    assert latest_valid(tmp_path).path == newest
    damage(newest, kind)
    assert latest_valid(tmp_path).path == good


def test_what_is_missing_is_named(save):
    folder = save("c", 1)
    index = index_of(folder)
    check_files(folder, index)
    damage(folder, "short")
    with pytest.raises(CorruptCheckpointError, match=r"has 11 bytes and the index needs 12.*a\.distcp"):
        check_files(folder, index)
    damage(folder, "missing")
    with pytest.raises(CheckpointNotFoundError, match=r"a\.distcp"):
        check_files(folder, index)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_refused(save, tmp_path, make):
    """A pipe is not waited for, and a device not read for ever."""
    for name in ("a.distcp", ".metadata"):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        folder = save("c", 1)
        place = folder / "sub" / name if name == "a.distcp" else folder / name
        place.unlink()
        make(place)
        with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError), match=name.replace(".", r"\.")):
            check_files(folder, index_of(folder))
        assert latest_valid(tmp_path) is None


def test_a_socket_is_no_index(save, tmp_path, monkeypatch):
    folder = save("c", 1)
    monkeypatch.chdir(folder)
    (folder / ".metadata").unlink()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(".metadata")
    with pytest.raises(UnsafeCheckpointError, match=r"\.metadata is not a file"):
        index_of(folder)


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointNotFoundError, match=str(folder)):
            index_of(folder)
    (tmp_path / "__0.metadata").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError):
        index_of(tmp_path)


def test_files_are_needed_up_to_their_last_item(rich):
    big = 40 * 1024 * 1024
    assert needed_bytes(rich) == {
        "__0_0.0123456789abcdef.distcp": 9700,
        "sub/__1_0.0123456789abcdef.distcp": 5_000_000_000 + 340 + 4 * big + 240,
    }

"""The crash kit's disk: it keeps what was synced, and of everything else any part."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dcp_crash import disk_states, mark, run_traced, snapshot
from dcp_crash.disk import DiskState, replay

pytestmark = pytest.mark.traced


def write(path: Path, data: bytes, *, sync: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwritev(descriptor, [data], 0)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def states(folder: Path, action, **options) -> list[DiskState]:
    before = snapshot(folder)
    run = run_traced(lambda rank: action(), folder, record=True)
    assert run.ranks[0].error is None, run.ranks[0].error
    return list(disk_states(before, run.changes, **options))


def after(folder: Path, found: list[DiskState]) -> list[dict[str, bytes]]:
    """The files of the states after the mark."""
    base = os.path.realpath(folder)
    return [
        {os.path.relpath(path, base): data for path, data in state.tree.items() if data is not None}
        for state in found
        if state.marks
    ]


OLD, NEW = b"old" * 1000, b"new" * 1000


def replace(folder: Path, *, sync_file: bool, sync_name: bool) -> None:
    write(folder / "temporary", NEW, sync=sync_file)
    os.replace(folder / "temporary", folder / "file")
    if sync_name:
        sync_folder(folder)
    mark("told")


def test_a_safe_replacement(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    found = states(tmp_path, lambda: replace(tmp_path, sync_file=True, sync_name=True))
    assert after(tmp_path, found) == [{"file": NEW}]
    contents = [state.tree[os.path.realpath(tmp_path / "file")] for state in found]
    assert set(contents) == {OLD, NEW}


def test_a_name_before_its_bytes(tmp_path: Path) -> None:
    """The classic mistake: without fsync the new name may hold nothing, zeros, or a torn mix."""
    (tmp_path / "file").write_bytes(OLD)
    found = states(tmp_path, lambda: replace(tmp_path, sync_file=False, sync_name=True), random_states=8)
    contents = {files.get("file") for files in after(tmp_path, found)}
    assert {b"", bytes(len(NEW)), NEW} <= contents
    torn = contents - {b"", bytes(len(NEW)), NEW}
    assert any(0 < data.count(0) < len(NEW) and data.count(0) % 512 in {0, len(NEW) % 512} for data in torn)


def test_a_name_that_is_not_synced_may_be_gone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    found = after(tmp_path, states(tmp_path, lambda: replace(tmp_path, sync_file=True, sync_name=False)))
    assert {files["file"] for files in found} == {OLD, NEW}
    # The rename is one thing: the temporary name does not stay when it happened.
    assert all(("temporary" in files) is False for files in found if files["file"] == NEW)


def test_removals_may_come_before_names(tmp_path: Path) -> None:
    """Names of one folder that are not synced come and go in any order."""
    (tmp_path / "one").write_bytes(OLD)

    def action() -> None:
        write(tmp_path / "two", NEW, sync=True)
        os.unlink(tmp_path / "one")
        mark("told")

    found = after(tmp_path, states(tmp_path, action))
    assert {} in found
    assert {"one": OLD, "two": NEW} in found
    assert {"one": OLD} in found
    assert {"two": NEW} in found


def test_a_sync_says_nothing_of_what_comes_later(tmp_path: Path) -> None:
    def action() -> None:
        write(tmp_path / "file", b"1" * 600, sync=True)
        sync_folder(tmp_path)
        descriptor = os.open(tmp_path / "file", os.O_WRONLY)
        os.pwritev(descriptor, [b"2" * 600], 600)
        os.ftruncate(descriptor, 1000)
        mark("told")

    contents = [files["file"] for files in after(tmp_path, states(tmp_path, action))]
    assert all(data.startswith(b"1" * 600) for data in contents)
    assert {b"1" * 600, b"1" * 600 + b"2" * 400, b"1" * 600 + b"2" * 600} <= set(contents)


def test_new_folders(tmp_path: Path) -> None:
    """A file whose folder the disk does not know is not there, however well it was synced."""

    def action(*, sync: bool) -> None:
        (tmp_path / "deep").mkdir()
        if sync:
            sync_folder(tmp_path)
        write(tmp_path / "deep" / "file", NEW, sync=True)
        sync_folder(tmp_path / "deep")
        mark("told")

    assert {} in after(tmp_path, states(tmp_path, lambda: action(sync=False)))
    (tmp_path / "deep" / "file").unlink()
    (tmp_path / "deep").rmdir()
    assert after(tmp_path, states(tmp_path, lambda: action(sync=True))) == [{"deep/file": NEW}]


def test_links_removed_folders_and_truncation(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    (tmp_path / "empty").mkdir()

    def action() -> None:
        os.link(tmp_path / "file", tmp_path / "other")
        os.rmdir(tmp_path / "empty")
        sync_folder(tmp_path)
        os.truncate(tmp_path / "other", 5)
        sync_folder(tmp_path)
        mark("told")

    found = states(tmp_path, action)
    assert {files["file"] for files in after(tmp_path, found)} == {OLD, OLD[:5]}
    assert all(files["file"] == files["other"] for files in after(tmp_path, found))
    assert not any(str(tmp_path / "empty") in state.tree for state in found if state.marks)


def test_states_are_put_into_a_folder(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    found = states(tmp_path / "there", lambda: replace(tmp_path / "there", sync_file=True, sync_name=True))
    (tmp_path / "put").mkdir()
    found[-1].put(tmp_path / "put", recorded=tmp_path / "there")
    assert snapshot(tmp_path / "put") == {
        os.path.realpath(tmp_path / "put"): None,
        os.path.realpath(tmp_path / "put" / "file"): NEW,
    }


def test_states_are_the_same_each_time(tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    run = run_traced(lambda rank: replace(tmp_path, sync_file=False, sync_name=False), tmp_path, record=True)
    first, again = (list(disk_states(before, run.changes, seed=3)) for _ in range(2))
    assert first == again
    assert len(first) > len(list(disk_states(before, run.changes, seed=3, every=4))) > 4


def test_a_renamed_directory_is_whole_or_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "file").write_bytes(OLD)

    def action(*, sync: bool) -> None:
        (tmp_path / "new").mkdir()
        write(tmp_path / "new" / "file", NEW, sync=True)
        sync_folder(tmp_path / "new")
        sync_folder(tmp_path)
        os.rename(tmp_path / "new", tmp_path / "step-2")
        os.rename(tmp_path / "step-2" / "file", tmp_path / "step-2" / "named")
        if sync:
            sync_folder(tmp_path / "step-2")
            sync_folder(tmp_path)
        mark("told")

    found = after(tmp_path, states(tmp_path, lambda: action(sync=False)))
    old = {"step-1/file": OLD}
    assert found == [
        *({**old, "new/file": NEW}, {**old, "step-2/named": NEW}),
        *({**old, "step-2/file": NEW}, {**old, "new/named": NEW}),
    ]
    shutil.rmtree(tmp_path / "step-2")
    assert after(tmp_path, states(tmp_path, lambda: action(sync=True))) == [{**old, "step-2/named": NEW}]


def test_a_directory_that_is_removed_and_made_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)

    def action() -> None:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        write(tmp_path / "file", NEW, sync=True)
        mark("told")

    assert after(tmp_path, states(tmp_path, action)) == [{"file": OLD}, {"file": NEW}, {}]


def test_a_symbolic_link_is_replaced_in_one_step(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("step-1")

    def action() -> None:
        (tmp_path / "new").symlink_to("step-2")
        os.replace(tmp_path / "new", tmp_path / "latest")
        mark("told")

    found = states(tmp_path, action)
    assert {state.tree[os.path.realpath(tmp_path) + "/latest"] for state in found} == {"step-1", "step-2"}
    (tmp_path / "put").mkdir()
    found[-1].put(tmp_path / "put", recorded=tmp_path)
    last = found[-1].tree[os.path.realpath(tmp_path) + "/latest"]
    assert os.readlink(tmp_path / "put" / "latest") == last


def test_all_changes_together_are_what_is_there(tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    run = run_traced(lambda rank: replace(tmp_path, sync_file=False, sync_name=False), tmp_path, record=True)
    assert replay(before, run.changes) == snapshot(tmp_path)


def test_a_sample_of_the_states(tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    run = run_traced(lambda rank: replace(tmp_path, sync_file=False, sync_name=False), tmp_path, record=True)
    every = list(disk_states(before, run.changes))
    few, again, others = (list(disk_states(before, run.changes, sample=5, seed=seed)) for seed in (1, 1, 2))
    assert few == again != others
    assert len(few) == 5
    many = list(disk_states(before, run.changes, sample=1000))
    assert [*map(contents, many)] != [*map(contents, every)]
    assert sorted(map(contents, many)) == sorted(map(contents, every))


def contents(state: DiskState) -> str:
    return repr((sorted(state.tree.items()), state.marks))


def test_what_is_not_modelled_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "elsewhere").write_bytes(OLD)
    before = snapshot(tmp_path / "there")
    moving = lambda rank: os.rename(tmp_path / "elsewhere", tmp_path / "there" / "file")  # noqa: E731
    run = run_traced(moving, tmp_path / "there", record=True)
    with pytest.raises(NotImplementedError, match="elsewhere: moves"):
        list(disk_states(before, run.changes))
    os.mkfifo(tmp_path / "there" / "pipe")
    with pytest.raises(NotImplementedError, match="pipe: neither"):
        snapshot(tmp_path / "there")

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading

import pytest

from dcp_io import LocalStore
from dcp_io.stores.store import Sink
from dcp_io.testing.folder import read_range
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError

BAD_NAMES = ["", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "./a", "a/", "a\\b", "a\0b"]


def write(store: LocalStore, name: str, data: bytes, *, sync: bool = False) -> Sink:
    sink = store.create(name, sync=sync)
    sink.write([data])
    sink.close()
    return sink


def test_round_trip(store):
    sink = store.create("x")
    sink.write([b"ab", memoryview(b"cd"), b"", bytearray(b"e")])
    sink.write([b"f"])
    sink.close()
    sink.close()
    assert store.read("x") == b"abcdef"
    assert store.size("x") == 6
    buffer = bytearray(3)
    read_range(store, "x", 2, memoryview(buffer))
    assert buffer == b"cde"
    source = store.open("x")
    parts = [bytearray(1), bytearray(2)]
    source.read_into(1, [memoryview(part) for part in parts])
    assert parts == [b"b", b"cd"]
    source.close()
    source.close()


def test_an_empty_object(store):
    write(store, "x", b"", sync=True)
    assert store.read("x") == b""
    assert [(entry.name, entry.bytes) for entry in store.list()] == [("x", 0)]


def test_create_never_replaces(store):
    write(store, "x", b"old")
    with pytest.raises(FileExistsError) as caught:
        store.create("x")
    assert caught.value.filename == os.path.join(store.path, "x")
    assert store.read("x") == b"old"


def test_create_does_not_follow_a_link(store, tmp_path):
    os.symlink(tmp_path / "target", os.path.join(store.path, "x"))
    with pytest.raises(FileExistsError):
        store.create("x")
    assert not (tmp_path / "target").exists()


def test_abort_removes_even_a_closed_object(store):
    sink = store.create("x")
    sink.write([b"1"])
    sink.abort()
    sink.abort()
    assert store.list() == []
    write(store, "x", b"2").abort()
    assert store.list() == []


def test_folders_within_names(store):
    write(store, "a/b/x", b"1", sync=True)
    assert store.read("a/b/x") == b"1"
    assert store.list() == []
    store.publish("a/y", b"2")
    assert store.read("a/y") == b"2"
    store.delete("a/b/x")
    store.delete("a/nowhere/x")
    assert not store.exists("a/b/x")


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("method", ["create", "read", "size", "exists", "delete", "touch", "open"])
def test_names_outside_are_refused(store, name, method):
    with pytest.raises(UnsafeCheckpointError):
        getattr(store, method)(name)
    with pytest.raises(UnsafeCheckpointError):
        store.publish(name, b"")


def test_links_that_lead_outside_are_refused(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"s")
    os.symlink(outside, os.path.join(store.path, "folder"))
    os.symlink(outside / "secret", os.path.join(store.path, "file"))
    for call in (
        lambda: store.read("folder/secret"),
        lambda: store.read("file"),
        lambda: read_range(store, "file", 0, memoryview(bytearray(1))),
        lambda: store.create("folder/new"),
        lambda: store.publish("folder/new", b""),
        lambda: store.delete("folder/secret"),
        lambda: store.touch("file"),
    ):
        with pytest.raises(UnsafeCheckpointError, match="outside"):
            call()
    assert os.listdir(outside) == ["secret"]
    store.delete("file")
    assert (outside / "secret").exists()


def test_links_that_stay_inside_are_read(store):
    write(store, "x", b"1")
    os.symlink("x", os.path.join(store.path, "link"))
    assert store.read("link") == b"1"
    assert store.size("link") == 1


def test_the_folder_itself_may_be_a_link(store, tmp_path):
    write(store, "a/x", b"1")
    os.symlink(store.path, tmp_path / "alias")
    assert LocalStore(tmp_path / "alias").read("a/x") == b"1"


def test_a_pipe_does_not_block_a_reader(store):
    os.mkfifo(os.path.join(store.path, "x"))
    with pytest.raises(UnsafeCheckpointError, match="not a file"):
        store.read("x")


@pytest.mark.parametrize("method", ["read", "size", "open", "touch"])
def test_missing_objects_are_named(store, method):
    with pytest.raises(CheckpointNotFoundError, match="checkpoint/x is missing"):
        getattr(store, method)("x")
    assert not store.exists("x")


def test_reading_past_the_end_names_file_and_offset(store):
    write(store, "x", b"abc")
    with pytest.raises(CorruptCheckpointError, match="ends at byte 3") as caught:
        read_range(store, "x", 1, memoryview(bytearray(3)))
    assert (caught.value.file, caught.value.offset) == ("x", 1)


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    for look in (LocalStore.list, LocalStore.folders):
        with pytest.raises(NotADirectoryError, match="file is a file"):
            look(LocalStore(file))
    LocalStore(file).delete("x")
    assert file.read_bytes() == b""


def test_make_makes_parents_and_may_be_repeated(tmp_path):
    store = LocalStore(tmp_path / "a" / "b" / "c")
    assert store.list() == []
    store.make()
    store.make()
    assert os.path.isdir(store.path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        LocalStore(tmp_path / "file" / "x").make()
    with pytest.raises(NotADirectoryError):
        LocalStore(tmp_path / "file").make()
    file = tmp_path / "file"
    with pytest.raises(
        NotADirectoryError, match=r"is a file.*`dcp convert \S+ FOLDER`.*dcp_format\.convert\('.*'\)"
    ) as caught:
        LocalStore(file).list()
    assert str(caught.value).count(str(file)) == 3
    with pytest.raises(NotADirectoryError, match=f"there can be no checkpoint at {file}/x/y: {file} is a file"):
        LocalStore(file / "x" / "y").list()


@pytest.mark.parametrize("below", ["", "x/y"])
@pytest.mark.parametrize("target", ["missing", "link"])
def test_a_link_that_leads_nowhere_is_not_called_a_file(tmp_path, below, target):
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(NotADirectoryError, match=f"link is a link to {target}, where there is nothing"):
        LocalStore(tmp_path / "link" / below).make()


def test_many_may_make_one_folder(tmp_path):
    threads = [threading.Thread(target=LocalStore(tmp_path / "a" / "b").make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.path.isdir(tmp_path / "a" / "b")


def test_publish_replaces_and_leaves_nothing_else(store):
    store.publish("x", b"one", tag="id")
    store.publish("x", b"two", tag="id")
    assert store.read("x") == b"two"
    assert [entry.name for entry in store.list()] == ["x"]


def test_published_temporaries_carry_the_tag(store, patch_os):
    seen = []

    def replace(source, target):
        seen.append(os.path.basename(source))
        raise OSError(errno.EIO, "broken")

    patch_os(replace=replace)
    with pytest.raises(OSError, match="broken"):
        store.publish(".metadata", b"x", tag="abc123")
    assert ".abc123." in seen[0]
    assert seen[0].endswith(".tmp")
    assert store.list() == []


def test_modes_follow_the_umask(store):
    old = os.umask(0o027)
    try:
        write(store, "x", b"")
        store.publish("y", b"")
    finally:
        os.umask(old)
    for name in ("x", "y"):
        assert stat.S_IMODE(os.stat(os.path.join(store.path, name)).st_mode) == 0o640


def test_touch_renews_the_time(store):
    write(store, "x", b"")
    os.utime(os.path.join(store.path, "x"), (1, 1))
    assert store.list()[0].mtime == 1
    store.touch("x")
    assert store.list()[0].mtime > 1e9


def test_errors_name_the_file(store, patch_os):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    patch_os(pwritev=full, fsync=full)
    sink = store.create("x")
    with pytest.raises(OSError, match="No space left") as caught:
        sink.write([b"abc"])
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, os.path.join(store.path, "x"))
    with pytest.raises(OSError, match="No space left") as caught:
        sink.close()
    assert caught.value.filename == os.path.join(store.path, "x")
    sink.abort()
    assert store.list() == []


def test_syncing_is_ordered(store, patch_os):
    """A file's bytes are synced before its name, and its name before the call returns."""
    log = []
    paths = {}

    def opened(path, flags, mode=0o777):
        fd = os.open(path, flags, mode)
        paths[fd] = os.path.basename(path)
        return fd

    patch_os(
        open=opened,
        pwritev=lambda fd, buffers, offset: log.append(("write", paths[fd])) or os.pwritev(fd, buffers, offset),
        fsync=lambda fd: log.append(("fsync", paths[fd])) or os.fsync(fd),
        replace=lambda a, b: log.append(("replace", os.path.basename(b))) or os.replace(a, b),
    )
    store.publish("x", b"1", tag="t")
    temporary = log[0][1]
    assert log == [("write", temporary), ("fsync", temporary), ("replace", "x"), ("fsync", "checkpoint")]
    log.clear()
    store.publish("x", b"1", tag="t", sync=False)
    assert [kind for kind, _ in log] == ["write", "replace"]


def test_a_file_that_is_replaced_while_the_folder_is_listed_is_there(store, monkeypatch):
    """As on btrfs: a name that is replaced after the folder was opened is missing from the listing."""
    for name in ("x", "y"):
        store.publish(name, b"old")
    scandir, hidden = os.scandir, [{"x"}, {"y"}]

    @contextlib.contextmanager
    def scan(path):
        now = hidden.pop(0) if hidden else set()
        with scandir(path) as found:
            yield [item for item in found if item.name not in now]

    monkeypatch.setattr("dcp_io.stores.local_store.os.scandir", scan)
    assert sorted(entry.name for entry in store.list()) == ["x", "y"]


def test_folder_of_another_process_that_is_seen_late(tmp_path, monkeypatch):
    """As on network file systems: the folder cannot be made, since it exists, but is not visible yet."""
    monkeypatch.setattr("dcp_io.stores.local_store._SECONDS_TO_BE_SEEN", 60.0)
    folder = tmp_path / "new"
    looks = []
    exists, is_folder, make = os.path.lexists, os.path.isdir, os.mkdir

    def mkdir(path):
        make(path)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def seen(look):
        def late(path):
            if str(path) != str(folder):
                return look(path)
            looks.append(path)
            return len(looks) > 3 and look(path)

        return late

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os.path, "lexists", seen(exists))
    monkeypatch.setattr(os.path, "isdir", seen(is_folder))
    store = LocalStore(folder)
    store.make()
    write(store, "x", b"data")
    assert len(looks) > 3


def test_file_systems_without_folder_sync_are_accepted(store, patch_os):
    def refuse(number):
        def fsync(fd):
            raise OSError(number, os.strerror(number))

        return fsync

    patch_os(fsync=refuse(errno.EINVAL))
    store.sync_folder()
    patch_os(fsync=refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        store.sync_folder()


@pytest.mark.parametrize("below", ["", "step-1"])
def test_links_of_a_hub_cache_lead_into_the_blobs_of_their_model(tmp_path, below):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123" / below
    for folder in (snapshot, tmp_path / "models--a--b/blobs/deep", tmp_path / "models--a--c/blobs", tmp_path / "away"):
        folder.mkdir(parents=True)
    files = ("models--a--b/blobs/x", "models--a--b/blobs/deep/x", "models--a--c/blobs/x", "models--a--b/x", "away/x")
    for file in files:
        (tmp_path / file).write_bytes(b"1")
    (tmp_path / "models--a--b/blobs/link").symlink_to(tmp_path / "away/x")
    store = LocalStore(snapshot)
    (snapshot / "good").symlink_to(os.path.relpath(tmp_path / files[0], snapshot))
    assert (store.read("good"), store.size("good")) == (b"1", 1)
    for target in (*files[1:], "models--a--b/blobs/link"):
        (snapshot / "bad").unlink(missing_ok=True)
        (snapshot / "bad").symlink_to(tmp_path / target)
        with pytest.raises(UnsafeCheckpointError, match=r"leads out.*cp -rL"):
            store.read("bad")
    (snapshot / "folder").symlink_to(tmp_path / "models--a--b/blobs")
    for write in (store.create, lambda name: store.publish(name, b"2"), store.delete):
        with pytest.raises(UnsafeCheckpointError, match="leads out"):
            write("folder/x")
    store.publish("good", b"2")  # replaces the link, and leaves its target
    assert (store.read("good"), (tmp_path / files[0]).read_bytes()) == (b"2", b"1")


def test_blobs_that_are_a_link_are_not_those_of_a_cache(tmp_path):
    snapshot = tmp_path / "model" / "snapshots" / "0123"
    for folder in (snapshot, tmp_path / "away"):
        folder.mkdir(parents=True)
    (tmp_path / "away" / "x").write_bytes(b"1")
    (tmp_path / "model" / "blobs").symlink_to(tmp_path / "away")
    (snapshot / "x").symlink_to("../../blobs/x")
    with pytest.raises(UnsafeCheckpointError, match="leads out"):
        LocalStore(snapshot).read("x")

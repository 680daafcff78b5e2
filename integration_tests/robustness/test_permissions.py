"""Who else can read or replace what is written: temporary files, shared memory, sockets. Nothing can be guessed."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp
import dcp_format
from dcp_async.savers.worker_handle import WorkerProcess
from dcp_async.staging.arenas import Arena
from dcp_io import LocalStore
from dcp_io.writing.encoded_data import EncodedData

STATE = {"t": torch.arange(6.0), "step": 7}


@pytest.fixture
def mask() -> Iterator[None]:
    """Whatever a test does, the mask of this process is as before."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}


def save_all(folder: Path) -> None:
    dcp.save(STATE, checkpoint_id=folder / "checkpoint", no_dist=True)
    dcp_format.convert(folder / "checkpoint", folder / "state.pt")
    writer = dcp_format.HuggingFaceStorageWriter(folder / "hf")
    dcp.save({"t": STATE["t"]}, storage_writer=writer, no_dist=True)


@pytest.mark.usefixtures("mask")
@pytest.mark.parametrize(("umask", "wanted"), [(0o077, {0o600, 0o700}), (0o022, {0o644, 0o755})])
def test_the_mask_of_the_process_counts(tmp_path: Path, umask: int, wanted: set[int]) -> None:
    """No file or folder is more open than the user lets new files be, on the way or in the end."""
    os.umask(umask)
    save_all(tmp_path / "new")
    assert modes(tmp_path / "new") == wanted


def test_names_of_temporary_files_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    real = os.open

    def opened(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            made.append((os.fspath(path), flags))
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", opened)
    for name in ("one", "two"):
        save_all(tmp_path / name)
    monkeypatch.undo()
    assert all(flags & os.O_EXCL and flags & os.O_NOFOLLOW for _, flags in made)
    one, two = ({path.split(f"/{name}/")[1] for path, _ in made if f"/{name}/" in path} for name in ("one", "two"))
    assert len(one) >= 6
    assert one.isdisjoint(two), "a name that comes again can be waited for"


def test_a_link_in_the_place_of_a_new_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    store = LocalStore(tmp_path / "folder")
    store.make()
    (tmp_path / "folder" / "new").symlink_to(victim)
    with pytest.raises(FileExistsError):
        store.create("new")
    store.publish("new", b"published")
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "folder" / "new").is_symlink()


def test_what_is_encoded_lies_in_a_file_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept = EncodedData(max_bytes=10)
    kept.write(b"x" * 100)
    descriptor = kept._kept.fileno()
    status = os.fstat(descriptor)
    assert [*tmp_path.iterdir()] == []
    assert (status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0o600)
    kept.free()


def test_shared_memory_has_no_name() -> None:
    arena = Arena(shared=True, pinned=False)
    arena.reserve(100)
    assert os.readlink(f"/proc/self/fd/{arena.descriptor}").startswith("/memfd:")
    assert not os.get_inheritable(arena.descriptor)
    assert os.fstat(arena.descriptor).st_nlink == 0
    arena.close()


def test_the_socket_of_a_worker_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair: nobody can connect to it, and no other child of the trainer inherits an end."""
    pairs: list[tuple[socket.socket, socket.socket]] = []
    passed: list[Any] = []
    real = socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        pairs.append(real())
        return pairs[-1]

    def started(*command: Any, pass_fds: Any, env: Any, **options: Any) -> Any:
        passed.append((pass_fds, env["PYTHONPATH"], [end.fileno() for end in pairs[-1]]))
        assert all(not end.getsockname() and not end.get_inheritable() for end in pairs[-1])
        raise InterruptedError("far enough")

    monkeypatch.setattr("dcp_async.savers.worker_handle.socket.socketpair", pair)
    monkeypatch.setattr("dcp_async.savers.worker_handle.subprocess.Popen", started)
    from dcp_async.options import WorkerOptions

    with pytest.raises(InterruptedError):
        WorkerProcess(WorkerOptions(), lambda: None)
    ((fds, search_path, (_, theirs)),) = passed
    assert fds == [theirs]
    assert all(map(os.path.isabs, search_path.split(os.pathsep)))  # none of them means the working folder
    for each in pairs[-1]:
        each.close()

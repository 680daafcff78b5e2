"""File systems that lack operations of `FsspecStore`: saves must be correct all the same."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from dcp_core import load, save
from dcp_fsspec import FsspecReader, FsspecWriter
from dcp_fsspec.opening import open_store
from dcp_fsspec.store import FsspecStore
from dcp_io import StorageError
from dcp_io.checkpoints.list_checkpoints import running_saves
from dcp_io.saves.save_files import Marker, ProcessIdentity


class Stubborn(MemoryFileSystem):
    """`mv` as HDFS does it: nothing happens if the destination exists, and no error says so."""

    protocol: Any = "stubborn"
    store: dict[str, Any] = {}  # noqa: RUF012 - as fsspec has it
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.partition("://")[2] or path))

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self._strip_protocol(path2) not in self.store:
            self.store[self._strip_protocol(path2)] = self.store.pop(self._strip_protocol(path1))


class Hdfs(Stubborn):
    """Like `Stubborn`, with the method of WebHDFS that takes an option to replace the destination."""

    protocol: Any = "webhdfs"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    def _call(self, op: str, *, method: str, path: str, destination: str, renameoptions: str) -> None:
        assert (op, method, renameoptions) == ("RENAME", "put", "OVERWRITE")
        self.store[self._strip_protocol(destination)] = self.store.pop(self._strip_protocol(path))


class Ftp(Stubborn):
    """Reports modification times only in the form of FTP."""

    protocol: Any = "ftp"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    modify = ""
    mv = MemoryFileSystem.mv

    def _told(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**{key: value for key, value in info.items() if key != "created"}, "modify": self.modify}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return [self._told(info) for info in super().ls(path, detail=True)]

    def modified(self, path: str) -> Any:
        raise NotImplementedError(path)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    known = dict(_registry)
    _registry.update({"stubborn": Stubborn, "webhdfs": Hdfs})
    yield
    _registry.clear()
    _registry.update(known)
    for kind in (Stubborn, Hdfs, Ftp):
        kind.store.clear()


def test_the_url_of_a_whole_file_system_keeps_its_scheme() -> None:
    store = open_store("memory://")
    assert (store.url, store.child("step-1").url) == ("memory://", "memory:///step-1")


def test_what_is_not_replaced_is_an_error_and_stays() -> None:
    store = open_store("stubborn://folder")
    store.publish("index", b"old")
    with pytest.raises(StorageError, match="did not replace stubborn://folder/index"):
        store.publish("index", b"new")
    assert store.read("index") == b"old"
    assert [entry.name for entry in store.list()] == ["index"]


def test_a_file_that_did_not_arrive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stubborn, "mv", lambda self, one, _: self.store.pop(self._strip_protocol(one)))
    with pytest.raises(StorageError, match="did not replace"):
        open_store("stubborn://folder").publish("index", b"new")


def test_a_save_that_cannot_replace_its_files_says_so() -> None:
    with pytest.raises(StorageError, match="did not replace"):
        save({"w": torch.ones(3)}, storage_writer=FsspecWriter("stubborn://checkpoint"), no_dist=True)


def test_hdfs_is_told_to_replace() -> None:
    for value in (1.0, 2.0):
        save({"w": torch.full((3,), value)}, storage_writer=FsspecWriter("webhdfs://checkpoint"), no_dist=True)
        state = {"w": torch.zeros(3)}
        load(state, storage_reader=FsspecReader("webhdfs://checkpoint"), no_dist=True)
        assert state["w"].tolist() == [value] * 3
    assert len(Hdfs.store) == 2, "an index and a data file, nothing left behind"


@pytest.mark.parametrize(
    ("modify", "is_alive"),
    [
        ("now", True),
        ("20200101000000", False),
        ("Jan  1 00:00", True),  # when is not known: it cannot be proven dead
    ],
)
def test_a_live_save_is_seen_over_ftp(modify: str, is_alive: bool) -> None:
    fs = Ftp(skip_instance_cache=True)
    fs.modify = time.strftime("%Y%m%d%H%M%S", time.gmtime()) if modify == "now" else modify
    store = FsspecStore(fs, "/folder", "ftp://host/folder")
    marker = Marker("abc", None, ProcessIdentity("other-host", "b", "n", 7, 1), "saving", time.time_ns())
    store.publish(marker.name, marker.to_bytes())
    assert bool(running_saves(store, stale_after_seconds=600)) == is_alive


@pytest.mark.parametrize("scheme", ["sftp", "ssh"])
def test_ssh_clients_get_no_option_that_they_do_not_know(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def set_missing_host_key_policy(self, policy: object) -> None:
            pass

        def connect(self, hostname: str, port: int = 22, username: str | None = None) -> None:
            assert (hostname, username) == ("host", "me")

        def open_sftp(self) -> None:
            pass

    policies = {f"{name}Policy": type(name, (), {}) for name in ("AutoAdd", "Reject", "Warning", "MissingHostKey")}
    monkeypatch.setitem(sys.modules, "paramiko", SimpleNamespace(SSHClient=Client, **policies))
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    store = open_store(f"{scheme}://host/folder", storage_options={"username": "me", "skip_instance_cache": True})
    assert store.url == f"{scheme}://host/folder"
    del sys.modules["fsspec.implementations.sftp"]  # it has seen what is no paramiko

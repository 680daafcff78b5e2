"""A folder of each host: its URI, and what is read elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from dcp_io import (
    Entry,
    HostFolder,
    HostStore,
    LocalStore,
    Sink,
    Source,
    Store,
    host_uri,
    open_store,
    split_also,
    with_also,
)
from dcp_io.stores.store import Buffer
from dcp_manifest import CheckpointNotFoundError, InvalidPlaceError


def test_a_uri_names_the_folder_and_the_others(tmp_path: Path) -> None:
    path = str(tmp_path / "a b?c")
    store = open_store(host_uri(path, ["/far/run?x=1&y", "near/by"]))
    assert isinstance(store, HostFolder)
    assert store.path == path
    assert store.place == "host"
    assert [other.url for other in store.also] == ["/far/run?x=1&y", str(Path("near/by").absolute())]
    assert open_store(store.url).url == store.url == host_uri(path)
    child = store.child("step-1")
    assert child.url == host_uri(f"{path}/step-1")
    assert [other.url for other in child.also] == ["/far/run?x=1&y/step-1", str(Path("near/by/step-1").absolute())]
    assert child.parent().url == store.url


@pytest.mark.parametrize("uri", ["host://near/run", "host://"])
def test_a_uri_without_an_absolute_path_is_refused(uri: str) -> None:
    with pytest.raises(InvalidPlaceError, match="write host:///path"):
        open_store(uri)


def test_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes no storage_options"):
        open_store(host_uri(tmp_path), storage_options={"endpoint": "x"})


def test_what_the_folder_lacks_is_read_elsewhere(tmp_path: Path) -> None:
    far = LocalStore(tmp_path / "far")
    far.make()
    for name, data in [("both", b"far"), ("far", b"only far"), ("short", b"whole")]:
        far.publish(name, data)
    store = HostFolder(tmp_path / "near", also=[far])
    store.make()
    store.publish("both", b"near")
    store.publish("short", b"wh")
    assert [store.read(name) for name in ("both", "far", "short")] == [b"near", b"only far", b"wh"]
    assert store.holding(["both", "far", "short", "none"]) == {"both", "short"}
    store.read_elsewhere({"short": 0, "far": 0})
    assert store.holding(["both", "far", "short", "none"]) == {"both", "short", "far"}
    assert store.read("short") == b"whole"
    assert store.size("far") == len(b"only far")
    with pytest.raises(CheckpointNotFoundError, match="near"):
        store.read("none")
    assert not far.exists("none")


class _Shelf(HostStore):
    """A store of each host in memory, in another package's style: `open_here` and `size_here` are its own."""

    shelves: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(self, name: str, *, also: Sequence[Store] = ()) -> None:
        super().__init__(also=also)
        self._name = name

    @property
    def url(self) -> str:
        return f"shelf://{self._name}"

    def _objects(self) -> dict[str, bytes]:
        return self.shelves.setdefault(self._name, {})

    def child(self, name: str) -> _Shelf:
        return _Shelf(f"{self._name}/{name}", also=[store.child(name) for store in self.also])

    def parent(self) -> _Shelf:
        return _Shelf(self._name.rpartition("/")[0])

    def open_here(self, name: str) -> Source:
        return Source(self, name)

    def size_here(self, name: str) -> int:
        return len(self._objects()[name])

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._objects()[name][offset : offset + len(buffer)]

    def exists(self, name: str) -> bool:
        return name in self._objects()

    def list(self) -> list[Entry]:
        return [Entry(name, len(data), 0.0) for name, data in self._objects().items()]

    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        self._objects()[name] = bytes(data)

    def make(self) -> None: ...
    def sync_folder(self) -> None: ...
    def delete(self, name: str) -> None:
        self._objects().pop(name, None)

    def create(self, name: str) -> Sink:
        raise NotImplementedError

    touch = create


def test_a_store_of_another_package_reads_elsewhere_too(tmp_path: Path) -> None:
    far = LocalStore(tmp_path / "far")
    for step in ("step-1", "step-2"):
        store = far.child(step)
        store.make()
        store.publish("far", step.encode())
    shelf = _Shelf("run", also=[far]).child("step-1")
    shelf.publish("near", b"here")
    assert shelf.uri([other.url for other in shelf.also]) == with_also("shelf://run/step-1", [f"{tmp_path}/far/step-1"])
    assert split_also(shelf.uri(["a?b", "c&d"])) == ("shelf://run/step-1", ["a?b", "c&d"])
    assert (shelf.uri(), shelf.place, shelf.parent().url) == ("shelf://run/step-1", "host", "shelf://run")
    assert [shelf.read(name) for name in ("near", "far")] == [b"here", b"step-1"]
    assert [shelf.size(name) for name in ("near", "far")] == [4, 6]
    assert shelf.holding(["near", "far"]) == {"near"}
    shelf.read_elsewhere({"near": 0})
    with pytest.raises(CheckpointNotFoundError):
        shelf.read("near")

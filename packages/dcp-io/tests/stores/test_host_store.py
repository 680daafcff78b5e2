"""A folder of each host: its URI, and what is read elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_base import InvalidPlaceError, installed
from dcp_io import HostStore, LocalStore, open_store
from dcp_io.stores.host_store import HostFolder, host_uri, with_also
from dcp_manifest import CheckpointNotFoundError
from integration_tests.kits.shelves import ShelfPlugin


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


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("DCP_SHELF_DIR", str(tmp_path / "host"))
    installed.register(ShelfPlugin(), name="shelves")
    yield "shelf://run"
    installed.unregister("shelves")


def test_a_store_of_another_package_reads_elsewhere_too(tmp_path: Path, shelf: str) -> None:
    far = LocalStore(tmp_path / "far")
    for step in ("step-1", "step-2"):
        store = far.child(step)
        store.make()
        store.publish("far", step.encode())
    uri = with_also("shelf://run/step-1", [f"{tmp_path}/far/step-1"])
    store = open_store(uri)
    assert isinstance(store, HostStore)
    assert not isinstance(store, LocalStore)
    store.make()
    store.publish("near", b"here")
    assert store.uri([other.url for other in store.also]) == uri
    assert open_store(with_also(shelf, [str(tmp_path / "far")])).child("step-1").url == store.url
    assert HostStore.split(store.uri(["a?b", "c&d"])) == ("shelf://run/step-1", ["a?b", "c&d"])
    assert (store.uri(), store.place, store.parent().url) == ("shelf://run/step-1", "host", "shelf://run")
    assert [store.read(name) for name in ("near", "far")] == [b"here", b"step-1"]
    assert [store.size(name) for name in ("near", "far")] == [4, 6]
    assert store.holding(["near", "far"]) == {"near"}
    store.read_elsewhere({"near": 0})
    with pytest.raises(CheckpointNotFoundError):
        store.read("near")

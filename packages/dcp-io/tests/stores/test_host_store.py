"""A folder of each host: its URI, and what is read elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_io import HostStore, LocalStore, host_uri, open_store
from dcp_manifest import CheckpointNotFoundError, InvalidPlaceError


def test_a_uri_names_the_folder_and_the_others(tmp_path: Path) -> None:
    path = str(tmp_path / "a b?c")
    store = open_store(host_uri(path, ["/far/run?x=1&y", "near/by"]))
    assert isinstance(store, HostStore)
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
    store = HostStore(tmp_path / "near", also=[far])
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

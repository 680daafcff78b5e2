"""Tests of subfolders of a store; the checkpoint manager, for example, needs subfolders."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_io.stores.store import Store
from dcp_io.testing.folder import RawFolder, StoreFixtures, write_object
from dcp_manifest.errors import UnsafeCheckpointError

__all__ = ["FolderTests"]


class FolderTests(StoreFixtures):
    """Tests of `Store.child`, `Store.folders` and `Store.remove_folder`."""

    def test_a_child_is_the_folder_of_that_name(self, place: Any, store: Store, raw: RawFolder) -> None:
        child = store.child("step-1")
        child.make()
        write_object(child, "x", b"1")
        child.publish("y", b"2")
        assert sorted(raw.names()) == ["step-1/x", "step-1/y"]
        assert store.read("step-1/x") == b"1"
        assert self.open_store(place, "checkpoint/step-1").read("y") == b"2"
        assert child.url == self.open_store(place, "checkpoint/step-1").url
        assert {entry.name for entry in child.list()} == {"x", "y"}
        assert store.child("a").child("b").url == store.child("a/b").url

    def test_folders_with_objects_are_listed(self, store: Store) -> None:
        assert store.folders() == ()
        write_object(store, "object", b"")
        for name in ("b", "a c", "a", "größe", "deep/er"):
            child = store.child(name)
            child.make()
            write_object(child, "x", b"")
        assert store.folders() == ("a", "a c", "b", "deep", "größe")
        assert store.child("deep").folders() == ("er",)
        assert store.child("nowhere").folders() == ()

    def test_a_folder_goes_with_its_last_object(self, store: Store) -> None:
        child = store.child("gone")
        child.make()
        write_object(child, "x", b"1")
        child.remove_folder()
        assert child.read("x") == b"1"
        child.delete("x")
        child.remove_folder()
        child.remove_folder()
        assert store.folders() == ()
        assert child.list() == []

    @pytest.mark.parametrize("name", ["", "/x", "..", "a/../b", "a/"])
    def test_folders_outside_are_refused(self, store: Store, name: str) -> None:
        with pytest.raises(UnsafeCheckpointError):
            store.child(name)

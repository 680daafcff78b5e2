"""Tests of listing a store: complete during concurrent changes, without subfolders, immediately up to date."""

from __future__ import annotations

import threading
import time
from typing import Any

from dcp_io.stores.store import Store
from dcp_io.testing.folder import RawFolder, StoreFixtures, write_object
from dcp_io.testing.objects import run_together

__all__ = ["ListingTests"]

_LISTINGS = 5


class ListingTests(StoreFixtures):
    """Tests of `Store.list`."""

    def test_entries_say_name_size_and_time(self, store: Store) -> None:
        started = time.time()
        for name, size in {"b": 0, ".metadata": 10, "a": 3000}.items():
            write_object(store, name, bytes(size))
        entries = {entry.name: entry for entry in store.list()}
        assert {name: entry.bytes for name, entry in entries.items()} == {"b": 0, ".metadata": 10, "a": 3000}
        # Seconds since 1970, on a clock that may differ from this machine's.
        assert all(abs(entry.mtime - started) < 3600 for entry in entries.values())

    def test_what_others_did_is_listed_at_once(self, store: Store, twin: Store) -> None:
        for number in range(10):
            write_object(store, f"created{number}", b"")
            store.publish(f"published{number}", b"")
            assert {f"created{number}", f"published{number}"} == {entry.name for entry in twin.list()}
            store.delete(f"created{number}")
            twin.delete(f"published{number}")
            assert store.list() == twin.list() == []

    def test_only_the_folder_itself_is_listed(self, place: Any, store: Store) -> None:
        near = ["checkpoin", "checkpoint2", "checkpoint.old", "checkpoint-", "checkpoint/below", "other"]
        for folder in near:
            neighbour = self.open_store(place, folder)
            neighbour.make()
            write_object(neighbour, f"in-{folder.replace('/', '-')}", b"")
        write_object(store, "a", b"")
        write_object(store, "zz/a", b"")
        assert [entry.name for entry in store.list()] == ["a"]

    def test_many_objects_are_listed_once_each(self, store: Store, raw: RawFolder) -> None:
        names = self._fill(raw)
        assert sorted(entry.name for entry in store.list()) == names

    def test_listing_is_complete_while_others_come_and_go(self, place: Any, store: Store, raw: RawFolder) -> None:
        names = self._fill(raw)
        done = threading.Event()

        def churn() -> None:
            other = self.open_store(place, "checkpoint")
            number = 0
            while not done.is_set():
                number += 1
                name = f"{number * 37 % len(names):05d}.passing"
                other.publish(name, b"")
                other.delete(name)

        def look() -> None:
            try:
                for _ in range(_LISTINGS):
                    listed = sorted(entry.name for entry in store.list())
                    assert [name for name in listed if "passing" not in name] == names
            finally:
                done.set()

        run_together([churn, look])

    def _fill(self, raw: RawFolder) -> list[str]:
        names = [f"{number:05d}" for number in range(self.listed_objects)]
        for name in names:
            raw.put(name, name.encode())
        return names

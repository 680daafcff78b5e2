"""`StoreConformance`: every test of the contract of a store, as one class to derive from."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from dcp_io.stores.store import Store
from dcp_io.testing.folder import RawFolder, StoreFixtures, read_range, write_object
from dcp_io.testing.objects import ObjectTests, run_together

__all__ = [
    "ListingTests",
    "PublishingTests",
    "StoreConformance",
]


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


_ROUNDS = 25
_BYTES = 1 << 20


class PublishingTests(StoreFixtures):
    """Tests of `Store.publish`, `Store.touch` and modification times."""

    @pytest.mark.parametrize("sync", [True, False])
    @pytest.mark.parametrize("data", [b"", b"new", memoryview(b"-new-")[1:4], bytearray(b"new" * 100_000)])
    def test_publish_makes_and_replaces(self, store: Store, twin: Store, raw: RawFolder, data: Any, sync: bool) -> None:
        for old in (None, b"", b"longer than the new one" * 20_000):
            if old is not None:
                raw.put("x", old)
            store.publish("x", data, tag="a-save", sync=sync)
            assert twin.read("x") == bytes(data) == raw.get("x")
            assert raw.names() == ["x"]

    def test_readers_see_the_old_object_or_the_new_one(self, place: Any, store: Store, twin: Store) -> None:
        store.publish("x", bytes(_BYTES))
        done = threading.Event()
        seen: list[int] = []

        def read() -> None:
            try:
                while not done.is_set():
                    data = twin.read("x")
                    assert data == data[:1] * _BYTES
                    assert twin.size("x") == _BYTES
                    assert twin.exists("x")
                    assert [entry.bytes for entry in twin.list() if entry.name == "x"] == [_BYTES]
                    seen.append(data[0])
            finally:
                done.set()

        def publish() -> None:
            writer = self.open_store(place, "checkpoint")
            try:
                for number in range(1, _ROUNDS):
                    reads = len(seen)
                    writer.publish("x", bytes([number]) * _BYTES)
                    deadline = time.monotonic() + 30
                    while len(seen) == reads and not done.is_set() and time.monotonic() < deadline:
                        time.sleep(0.001)
            finally:
                done.set()

        run_together([read, publish])
        assert seen == sorted(seen)
        assert len(set(seen)) >= _ROUNDS // 2

    def test_of_many_publishers_the_last_wins_whole(self, place: Any, store: Store, raw: RawFolder) -> None:
        def publish(number: int) -> None:
            writer = self.open_store(place, "checkpoint")
            for _ in range(5):
                writer.publish("x", bytes([number]) * 100_000, tag=str(number))

        run_together([lambda number=number: publish(number) for number in range(6)])  # type: ignore[misc]
        data = store.read("x")
        assert data == data[:1] * 100_000
        assert raw.names() == ["x"]

    def test_an_object_that_was_read_is_read_anew(self, store: Store, twin: Store) -> None:
        store.publish("x", b"old")
        assert (twin.read("x"), twin.size("x"), twin.open("x").size()) == (b"old", 3, 3)
        store.publish("x", b"newer")
        assert (twin.read("x"), twin.size("x"), twin.open("x").size()) == (b"newer", 5, 5)
        buffer = bytearray(2)
        read_range(twin, "x", 3, memoryview(buffer))
        assert buffer == b"er"

    def test_times_follow_one_clock(self, store: Store) -> None:
        write_object(store, "a", b"")
        time.sleep(self.clock_seconds)
        store.publish("b", b"")
        time.sleep(self.clock_seconds)
        write_object(store, "c", b"1")
        times = {entry.name: entry.mtime for entry in store.list()}
        assert times["a"] < times["b"] < times["c"] < times["a"] + 60
        time.sleep(self.clock_seconds)
        store.publish("a", b"")
        assert {entry.name: entry.mtime for entry in store.list()}["a"] > times["c"]

    def test_touch_renews_the_time_and_nothing_else(self, store: Store, twin: Store, raw: RawFolder) -> None:
        store.publish("x", b"data")
        store.publish("y", b"")
        before = {entry.name: entry.mtime for entry in twin.list()}
        time.sleep(self.clock_seconds)
        store.touch("x")
        after = {entry.name: entry.mtime for entry in twin.list()}
        assert after["x"] > max(before.values())
        assert after["y"] == before["y"]
        assert raw.get("x") == b"data"
        assert sorted(raw.names()) == ["x", "y"]

    def test_touch_never_undoes_a_deletion_or_a_change(self, place: Any, store: Store) -> None:
        done = threading.Event()

        def touch() -> None:
            other = self.open_store(place, "checkpoint")
            while not done.is_set():
                for name in ("x", "y"):
                    try:
                        other.touch(name)
                    except FileNotFoundError:
                        continue

        def change() -> None:
            try:
                for number in range(_ROUNDS):
                    data = str(number).encode()
                    store.publish("x", data)
                    store.publish("y", data)
                    store.delete("x")
                    time.sleep(0.005)
                    assert not store.exists("x")
                    assert store.read("y") == data
            finally:
                done.set()

        run_together([touch, touch, change])


class StoreConformance(ObjectTests, PublishingTests, ListingTests):
    """All tests of the contract. Derive a test class that opens the store, and gives raw access to its objects.

    Derive also from `FoldersConformance`, `RangesConformance` and `LendingConformance`, if the store supports them.

    ```python
    class TestMyStore(StoreConformance):
        @pytest.fixture
        def place(self, tmp_path):
            return tmp_path

        def open_store(self, place, folder):
            return MyStore(place / folder)

        def open_raw(self, place, folder):
            return MyRawFolder(place / folder)
    ```
    """

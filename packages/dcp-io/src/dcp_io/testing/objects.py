"""Tests of single objects."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcp_io.stores.store import Source, Store
from dcp_io.testing.folder import RawFolder, StoreFixtures, read_range, write_object
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError

__all__ = ["ObjectTests"]

_NAMES_OUTSIDE = ["", "/x", "..", "../x", "a/../../x", "a//b", "./a", "a/", "a\\b", "a\0b"]
_ODD_NAMES = [".dcp-save-0a", "__0_1.ab.distcp", "a b", "50%25", "a+b", "what?", "#1", "größe", "a/b/c", "x:y&z=;"]
_CALLS: dict[str, Callable[[Store, str], object]] = {
    "create": lambda store, name: store.create(name),
    "publish": lambda store, name: store.publish(name, b""),
    "touch": lambda store, name: store.touch(name),
    "read": lambda store, name: store.read(name),
    "read_into": lambda store, name: read_range(store, name, 0, memoryview(bytearray(1))),
    "open": lambda store, name: store.open(name).size(),
    "size": lambda store, name: store.size(name),
    "exists": lambda store, name: store.exists(name),
    "delete": lambda store, name: store.delete(name),
}
_RACERS = 8
_ROUNDS = 10


class ObjectTests(StoreFixtures):
    """Tests of creating, reading and deleting objects."""

    def test_making_the_folder_may_be_repeated(self, place: Any) -> None:
        store = self.open_store(place, "not/there/yet")
        assert store.list() == []
        store.make()
        write_object(store, "x", b"1")
        store.make()
        assert store.read("x") == b"1"

    def test_urls_tell_folders_apart(self, place: Any) -> None:
        store, twin, other = (self.open_store(place, folder) for folder in ("a", "a", "b"))
        assert store.url == twin.url != other.url

    def test_what_is_written_is_stored(self, store: Store, raw: RawFolder) -> None:
        sink = store.create("x")
        assert sink.name == "x"
        sink.write([b"ab", memoryview(b"-cd-")[1:3], b"", bytearray(b"e")])
        sink.write([])
        sink.write([b"f"])
        sink.close()
        store.sync_folder()
        sink.close()
        assert raw.get("x") == b"abcdef"
        assert store.read("x") == b"abcdef"

    def test_what_is_stored_is_read(self, store: Store, raw: RawFolder) -> None:
        raw.put("x", b"stored by others")
        assert store.read("x") == b"stored by others"
        assert store.size("x") == 16
        assert store.exists("x")

    def test_an_empty_object(self, store: Store, raw: RawFolder) -> None:
        store.create("x").close()
        assert raw.get("x") == b""
        assert store.read("x") == b""
        assert store.size("x") == 0
        read_range(store, "x", 0, memoryview(bytearray()))

    def test_buffers_are_not_kept(self, store: Store) -> None:
        buffer = bytearray(b"x" * 100_000)
        sink = store.create("x")
        for letter in b"abc":
            buffer[:] = bytes([letter]) * len(buffer)
            sink.write([buffer])
        buffer[:] = b"?" * len(buffer)
        sink.close()
        assert store.read("x") == b"".join(bytes([letter]) * len(buffer) for letter in b"abc")

    def test_megabytes_in_many_pieces(self, store: Store) -> None:
        pieces = [bytes([number % 251]) * (1 + number * 37 % 4096) for number in range(3000)]
        sink = store.create("x")
        for start in range(0, len(pieces), 1500):
            sink.write(pieces[start : start + 1500])
        sink.close()
        assert store.read("x") == b"".join(pieces)

    def test_create_never_replaces(self, store: Store, raw: RawFolder) -> None:
        raw.put("x", b"old")
        with pytest.raises(FileExistsError, match="x"):
            write_object(store, "x", b"new")
        assert raw.get("x") == b"old"
        assert raw.names() == ["x"]

    def test_of_many_creators_one_wins(self, place: Any, store: Store, raw: RawFolder) -> None:
        barrier = threading.Barrier(_RACERS)
        outcomes: list[int | str] = []

        def create(number: int) -> None:
            racer = self.open_store(place, "checkpoint")
            barrier.wait()
            try:
                write_object(racer, "x", bytes([number]) * 1000)
            except FileExistsError:
                outcomes.append("refused")
            else:
                outcomes.append(number)

        run_together([lambda number=number: create(number) for number in range(_RACERS)])  # type: ignore[misc]
        (winner,) = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert len(outcomes) == _RACERS
        assert raw.get("x") == store.read("x") == bytes([winner]) * 1000

    def test_an_unfinished_object_shows_nothing_but_its_beginning(self, store: Store, twin: Store) -> None:
        whole = bytes(range(256)) * 1000
        sink = store.create("x")
        for start in range(0, len(whole), 64_000):
            sink.write([whole[start : start + 64_000]])
            if twin.exists("x"):
                assert whole.startswith(twin.read("x"))
        sink.close()
        assert twin.read("x") == whole

    def test_abort_leaves_nothing(self, store: Store, raw: RawFolder) -> None:
        sink = store.create("x")
        sink.write([b"1" * 100_000])
        sink.abort()
        sink.abort()
        assert raw.names() == []
        sink = store.create("x")
        sink.write([b"2"])
        sink.close()
        sink.abort()
        assert raw.names() == []
        assert not store.exists("x")

    def test_a_with_block_ends_a_sink(self, store: Store, raw: RawFolder) -> None:
        with store.create("x") as sink:
            sink.write([b"1"])
        with contextlib.suppress(ZeroDivisionError), store.create("y") as sink:
            sink.write([b"2"])
            raise ZeroDivisionError
        assert raw.names() == ["x"]
        assert raw.get("x") == b"1"

    def test_a_sink_that_has_ended_takes_no_bytes(self, store: Store, raw: RawFolder) -> None:
        for end in ("close", "abort"):
            sink = store.create(end)
            sink.write([b"1"])
            getattr(sink, end)()
            with pytest.raises(ValueError, match=end):
                sink.write([b"2"])
        assert raw.names() == ["close"]
        assert raw.get("close") == b"1"

    def test_abort_spares_the_object_of_another(self, store: Store, raw: RawFolder) -> None:
        raw.put("x", b"theirs")
        with pytest.raises(FileExistsError):
            write_object(store, "x", b"ours")
        store.publish("x", b"newer")
        assert raw.get("x") == b"newer"

    @pytest.mark.parametrize("name", _ODD_NAMES)
    def test_odd_names(self, store: Store, raw: RawFolder, name: str) -> None:
        write_object(store, name, b"created")
        assert raw.get(name) == store.read(name) == b"created"
        assert raw.names() == [name]
        assert [entry.name for entry in store.list()] == ([] if "/" in name else [name])
        store.publish(name, b"published")
        assert raw.get(name) == b"published"
        store.touch(name)
        assert store.size(name) == 9
        store.delete(name)
        assert raw.names() == []

    @pytest.mark.parametrize("call", _CALLS)
    def test_names_that_leave_the_folder_are_refused(self, store: Store, call: str) -> None:
        for name in _NAMES_OUTSIDE:
            with pytest.raises(UnsafeCheckpointError):
                _CALLS[call](store, name)

    @pytest.mark.parametrize("call", ["touch", "read", "read_into", "open", "size"])
    def test_missing_objects_are_named(self, store: Store, raw: RawFolder, call: str) -> None:
        with pytest.raises(CheckpointNotFoundError, match="some-object"):
            _CALLS[call](store, "some-object")
        assert not store.exists("some-object")
        assert raw.names() == []

    @pytest.mark.parametrize("call", ["read", "size"])
    def test_a_missing_folder_holds_nothing(self, place: Any, call: str) -> None:
        store = self.open_store(place, "nowhere")
        with pytest.raises(CheckpointNotFoundError):
            _CALLS[call](store, "x")
        assert not store.exists("x")
        store.delete("x")

    def test_deleting(self, store: Store, twin: Store, raw: RawFolder) -> None:
        raw.put("x", b"1")
        raw.put("xy", b"2")
        store.delete("x")
        store.delete("x")
        assert raw.names() == ["xy"]
        assert not twin.exists("x")
        write_object(store, "x", b"again")
        assert twin.read("x") == b"again"

    def test_a_read_during_a_delete_gives_the_whole_object_or_raises(self, store: Store, twin: Store) -> None:
        whole = bytes(range(256)) * 400
        buffer = bytearray(len(whole))
        for number in range(_ROUNDS):
            name = f"x{number}"
            store.publish(name, whole)
            source = twin.open(name)

            def read(name: str = name, source: Source = source) -> None:
                with contextlib.suppress(CheckpointNotFoundError):
                    assert twin.read(name) == whole
                buffer[:] = bytes(len(buffer))
                with contextlib.suppress(CheckpointNotFoundError), contextlib.closing(source):
                    source.read_into(0, [memoryview(buffer)])
                    assert buffer == whole

            run_together([read, lambda name=name: store.delete(name)])  # type: ignore[misc]
        assert store.list() == []

    @pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (0, 1000), (1, 999), (999, 1000), (400, 600), (7, 7)])
    def test_ranges(self, store: Store, raw: RawFolder, start: int, stop: int) -> None:
        whole = bytes(number % 253 for number in range(1000))
        raw.put("x", whole)
        buffer = bytearray(b"!" * (stop - start + 2))
        read_range(store, "x", start, memoryview(buffer)[1:-1])
        assert buffer == b"!" + whole[start:stop] + b"!"

    @pytest.mark.parametrize(("offset", "length"), [(0, 11), (9, 2), (10, 1), (500, 1), (5, 1000)])
    def test_reading_past_the_end_is_refused(self, store: Store, raw: RawFolder, offset: int, length: int) -> None:
        raw.put("x", b"0123456789")
        with pytest.raises(CorruptCheckpointError) as caught:
            read_range(store, "x", offset, memoryview(bytearray(length)))
        assert (caught.value.file, caught.value.offset) == ("x", offset)
        source = store.open("x")
        try:
            with pytest.raises(CorruptCheckpointError, match="'x'"):
                source.read_into(offset, [memoryview(bytearray(length))])
        finally:
            source.close()

    def test_an_open_object_serves_many_threads(self, store: Store, raw: RawFolder) -> None:
        whole = bytes(number * 7 % 251 for number in range(100_000))
        raw.put("x", whole)
        source = store.open("x")
        assert source.size() == len(whole)
        right: list[bool] = []

        def read(first: int) -> None:
            for start in range(first, 90_000, 9_000):
                parts = [bytearray(10), bytearray(0), bytearray(5000)]
                source.read_into(start, [memoryview(part) for part in parts])
                right.append(b"".join(parts) == whole[start : start + 5010])

        run_together([lambda first=first: read(first) for first in range(8)])  # type: ignore[misc]
        source.close()
        source.close()
        assert right == [True] * 80


def run_together(tasks: list[Callable[[], None]]) -> None:
    """Run each task in its own thread; raises the first error."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        for running in [pool.submit(task) for task in tasks]:
            running.result()

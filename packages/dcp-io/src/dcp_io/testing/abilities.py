"""Tests of optional abilities: subfolders, writing ranges, and lending memory."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from dcp_io.lent_memory import LentMemory, SupportsLending
from dcp_io.stores.store import Store, SupportsFolders, SupportsRanges, with_folders
from dcp_io.testing.folder import RawFolder, StoreFixtures, write_object
from dcp_io.testing.objects import run_together
from dcp_manifest.errors import CheckpointNotFoundError, UnsafeCheckpointError

__all__ = [
    "FoldersConformance",
    "LendingConformance",
    "RangesConformance",
]


class FoldersConformance(StoreFixtures):
    """Tests of a store that `SupportsFolders`; derive from both test classes."""

    @pytest.fixture
    def store(self, place: Any) -> SupportsFolders:
        store = with_folders(self.open_store(place, "checkpoint"))
        store.make()
        return store

    def test_a_child_is_the_folder_of_that_name(self, place: Any, store: SupportsFolders, raw: RawFolder) -> None:
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

    def test_folders_with_objects_are_listed(self, store: SupportsFolders) -> None:
        assert store.folders() == ()
        write_object(store, "object", b"")
        for name in ("b", "a c", "a", "größe", "deep/er"):
            child = store.child(name)
            child.make()
            write_object(child, "x", b"")
        assert store.folders() == ("a", "a c", "b", "deep", "größe")
        assert store.child("deep").folders() == ("er",)
        assert store.child("nowhere").folders() == ()

    def test_a_folder_goes_with_its_last_object(self, store: SupportsFolders) -> None:
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
    def test_folders_outside_are_refused(self, store: SupportsFolders, name: str) -> None:
        with pytest.raises(UnsafeCheckpointError):
            store.child(name)


_WRITERS = 6
_PIECE_BYTES = 1000


class RangesConformance(StoreFixtures):
    """Tests of a store that `SupportsRanges`; derive from both test classes.

    ```python
    class TestMyStore(StoreConformance, RangesConformance): ...
    ```
    """

    @pytest.fixture
    def store(self, place: Any) -> SupportsRanges:
        store = self._open(place)
        store.make()
        return store

    def _open(self, place: Any) -> SupportsRanges:
        store = self.open_store(place, "checkpoint")
        assert isinstance(store, SupportsRanges)
        return store

    @pytest.mark.parametrize("size", [0, 1, 5_000_000])
    def test_a_sized_object_begins_as_zeros(self, store: SupportsRanges, raw: RawFolder, size: int) -> None:
        sink = store.create_sized("x", size)
        assert (sink.name, sink.size) == ("x", size)
        sink.close(sync=True)
        sink.close(sync=True)
        assert store.size("x") == size
        assert raw.get("x") == bytes(size)
        assert raw.names() == ["x"]

    def test_ranges_are_written_in_any_order(self, store: SupportsRanges, raw: RawFolder) -> None:
        sink = store.create_sized("x", 10)
        sink.write_at(6, [b"gh", b"", memoryview(b"-ij-")[1:3]])
        sink.write_at(0, [bytearray(b"ab")])
        sink.start_sync(0, 10)
        sink.write_at(2, [])
        sink.close(sync=True)
        assert raw.get("x") == b"ab\0\0\0\0ghij"

    def test_many_writers_share_an_object(self, place: Any, store: SupportsRanges, raw: RawFolder) -> None:
        total = 4 * _WRITERS
        store.create_sized("x", total * _PIECE_BYTES).close(sync=False)

        def write(number: int) -> None:
            sink = self._open(place).open_sized("x")
            assert sink.size == total * _PIECE_BYTES
            for piece in range(number, total, _WRITERS):
                sink.write_at(piece * _PIECE_BYTES, [bytes([piece]) * _PIECE_BYTES])
            sink.close(sync=True)

        run_together([lambda number=number: write(number) for number in range(_WRITERS)])  # type: ignore[misc]
        assert raw.get("x") == b"".join(bytes([piece]) * _PIECE_BYTES for piece in range(total))

    @pytest.mark.parametrize(("offset", "length"), [(-1, 1), (10, 1), (9, 2), (0, 11), (1 << 40, 0)])
    def test_ranges_outside_the_object_are_refused(
        self, store: SupportsRanges, raw: RawFolder, offset: int, length: int
    ) -> None:
        sink = store.create_sized("x", 10)
        with pytest.raises(ValueError, match="10 bytes"):
            sink.write_at(offset, [b"1" * length])
        sink.close(sync=False)
        assert raw.get("x") == bytes(10)

    def test_a_sized_object_never_replaces_another(self, store: SupportsRanges, raw: RawFolder) -> None:
        raw.put("x", b"old")
        with pytest.raises(FileExistsError, match="x"):
            store.create_sized("x", 100)
        assert raw.get("x") == b"old"

    def test_a_negative_size_is_refused(self, store: SupportsRanges, raw: RawFolder) -> None:
        with pytest.raises(ValueError, match="-1"):
            store.create_sized("x", -1)
        assert raw.names() == []

    def test_only_an_existing_object_is_opened(self, store: SupportsRanges, raw: RawFolder) -> None:
        with pytest.raises(CheckpointNotFoundError, match="some-object"):
            store.open_sized("some-object")
        assert raw.names() == []

    @pytest.mark.parametrize("name", ["", "/x", "../x", "a//b", "a\0b"])
    def test_ranges_stay_in_the_folder(self, store: SupportsRanges, name: str) -> None:
        with pytest.raises(UnsafeCheckpointError):
            store.create_sized(name, 1)
        with pytest.raises(UnsafeCheckpointError):
            store.open_sized(name)


_BYTES = 1_000_000


class LendingConformance(StoreFixtures):
    """Tests of a store that `SupportsLending`; derive from both test classes."""

    @pytest.mark.parametrize("sizes", [[_BYTES], [5, 300_000, 70_000, 1]])
    def test_staged_bytes_are_stored(self, store: Store, raw: RawFolder, sizes: list[int]) -> None:
        loan = self._lent(store)
        sink = store.create("x")
        for part in _parts(loan, sizes):
            sink.write([part])
        sink.close()
        loan.give_back()
        loan.give_back()
        assert raw.get("x") == store.read("x") == _pattern(1)[: sum(sizes)]

    def test_an_object_keeps_its_bytes_when_the_memory_is_lent_again(self, store: Store, raw: RawFolder) -> None:
        loan = self._lent(store)
        sink = store.create("x")
        sink.write([memoryview(loan.memory)[:_BYTES]])
        sink.close()
        with closing(store.open("x")) as source:
            loan.give_back()
            again = self._lent(store, 2)
            kept = bytearray(_BYTES)
            source.read_into(0, [memoryview(kept)])
        assert kept == _pattern(1)
        again.give_back()
        assert raw.get("x") == _pattern(1)

    def test_an_aborted_object_leaves_the_loan(self, store: Store, raw: RawFolder) -> None:
        loan = self._lent(store)
        sink = store.create("x")
        sink.write([memoryview(loan.memory)[:_BYTES]])
        sink.abort()
        assert raw.names() == []
        assert loan.memory[:_BYTES] == _pattern(1)
        loan.give_back()

    def _lent(self, store: Any, seed: int = 1) -> LentMemory:
        assert isinstance(store, SupportsLending)
        lender = store.lender()
        lender.prepare(_BYTES)
        loan = lender.lend(_BYTES, timeout_seconds=10)
        assert loan.nbytes >= _BYTES
        assert not loan.closed
        loan.memory[:_BYTES] = _pattern(seed)
        return loan


def _pattern(seed: int) -> bytes:
    return bytes((number * seed + seed) % 251 for number in range(251)) * (_BYTES // 251) + bytes(_BYTES % 251)


def _parts(loan: LentMemory, sizes: list[int]) -> list[memoryview]:
    view, start, parts = memoryview(loan.memory), 0, []
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    return parts

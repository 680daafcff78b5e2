"""Tests of the optional ability to write ranges of an object of known size, from several threads and processes."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_io.stores.store import Store
from dcp_io.testing.folder import RawFolder, StoreFixtures
from dcp_io.testing.objects import run_together
from dcp_manifest.errors import CheckpointNotFoundError, UnsafeCheckpointError

__all__ = ["RangeConformance"]

_WRITERS = 6
_PIECE_BYTES = 1000


class RangeConformance(StoreFixtures):
    """Tests of `Store.create_sized` and `open_sized`, for a store that `writes_ranges`; derive from both test classes.

    ```python
    class TestMyStore(StoreConformance, RangeConformance): ...
    ```
    """

    def test_the_store_offers_ranges(self, store: Store) -> None:
        assert store.writes_ranges

    @pytest.mark.parametrize("size", [0, 1, 5_000_000])
    def test_a_sized_object_begins_as_zeros(self, store: Store, raw: RawFolder, size: int) -> None:
        sink = store.create_sized("x", size)
        assert (sink.name, sink.size) == ("x", size)
        sink.close(sync=True)
        sink.close(sync=True)
        assert store.size("x") == size
        assert raw.get("x") == bytes(size)
        assert raw.names() == ["x"]

    def test_ranges_are_written_in_any_order(self, store: Store, raw: RawFolder) -> None:
        sink = store.create_sized("x", 10)
        sink.write_at(6, [b"gh", b"", memoryview(b"-ij-")[1:3]])
        sink.write_at(0, [bytearray(b"ab")])
        sink.start_sync(0, 10)
        sink.write_at(2, [])
        sink.close(sync=True)
        assert raw.get("x") == b"ab\0\0\0\0ghij"

    def test_many_writers_share_an_object(self, place: Any, store: Store, raw: RawFolder) -> None:
        total = 4 * _WRITERS
        store.create_sized("x", total * _PIECE_BYTES).close(sync=False)

        def write(number: int) -> None:
            sink = self.open_store(place, "checkpoint").open_sized("x")
            assert sink.size == total * _PIECE_BYTES
            for piece in range(number, total, _WRITERS):
                sink.write_at(piece * _PIECE_BYTES, [bytes([piece]) * _PIECE_BYTES])
            sink.close(sync=True)

        run_together([lambda number=number: write(number) for number in range(_WRITERS)])  # type: ignore[misc]
        assert raw.get("x") == b"".join(bytes([piece]) * _PIECE_BYTES for piece in range(total))

    @pytest.mark.parametrize(("offset", "length"), [(-1, 1), (10, 1), (9, 2), (0, 11), (1 << 40, 0)])
    def test_ranges_outside_the_object_are_refused(
        self, store: Store, raw: RawFolder, offset: int, length: int
    ) -> None:
        sink = store.create_sized("x", 10)
        with pytest.raises(ValueError, match="10 bytes"):
            sink.write_at(offset, [b"1" * length])
        sink.close(sync=False)
        assert raw.get("x") == bytes(10)

    def test_a_sized_object_never_replaces_another(self, store: Store, raw: RawFolder) -> None:
        raw.put("x", b"old")
        with pytest.raises(FileExistsError, match="x"):
            store.create_sized("x", 100)
        assert raw.get("x") == b"old"

    def test_a_negative_size_is_refused(self, store: Store, raw: RawFolder) -> None:
        with pytest.raises(ValueError, match="-1"):
            store.create_sized("x", -1)
        assert raw.names() == []

    def test_only_an_existing_object_is_opened(self, store: Store, raw: RawFolder) -> None:
        with pytest.raises(CheckpointNotFoundError, match="some-object"):
            store.open_sized("some-object")
        assert raw.names() == []

    @pytest.mark.parametrize("name", ["", "/x", "../x", "a//b", "a\0b"])
    def test_ranges_stay_in_the_folder(self, store: Store, name: str) -> None:
        with pytest.raises(UnsafeCheckpointError):
            store.create_sized(name, 1)
        with pytest.raises(UnsafeCheckpointError):
            store.open_sized(name)

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from dcp_io import (
    Entry,
    RequestSource,
    SaveInProgressError,
    Sink,
    Store,
    SupportsFetch,
    SupportsFolders,
    SupportsPlace,
    SupportsRanges,
    SupportsReadAhead,
    SupportsReadSizes,
    check_name,
    verify_checkpoint,
)
from dcp_io.lent_memory import lender_of
from dcp_io.reading.read_plan import ReadSizes
from dcp_io.saves.save_session import SaveSession
from dcp_io.stores.store import SupportsReadPieces, place_of, with_folders
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError


class MemorySink(Sink):
    def __init__(self, store, name):
        self._store, self._name, self._data = store, name, bytearray()

    @property
    def name(self):
        return self._name

    def write(self, buffers):
        for buffer in buffers:
            self._data += buffer

    def close(self):
        self._store.objects[self._name] = (bytes(self._data), time.time())

    def abort(self):
        self._store.objects.pop(self._name, None)


class MemoryStore(Store):
    """A store with only the required methods: neither renames nor open files."""

    def __init__(self):
        self.objects = {}
        self._lock = threading.Lock()

    @property
    def url(self):
        return f"memory://{id(self)}"

    def make(self):
        pass

    def create(self, name, *, sync=True):
        with self._lock:
            if check_name(name) in self.objects:
                raise FileExistsError(name)
            self.objects[name] = (b"", time.time())
        return MemorySink(self, name)

    def publish(self, name, data, *, tag="", sync=True):
        self.objects[check_name(name)] = (bytes(data), time.time())

    def touch(self, name):
        with self._lock:
            self.objects[name] = (self.read(name), time.time())

    def read(self, name):
        if check_name(name) not in self.objects:
            raise CheckpointNotFoundError(f"{name} is missing")
        return self.objects[name][0]

    def open(self, name):
        return RequestSource(partial(self.size, name), partial(self._read_range, name))

    def _read_range(self, name, offset, buffer):
        data = self.read(name)[offset : offset + len(buffer)]
        if len(data) < len(buffer):
            raise CorruptCheckpointError("too short", file=name, offset=offset)
        buffer[:] = data

    def size(self, name):
        return len(self.read(name))

    def exists(self, name):
        return name in self.objects

    def list(self):
        return [Entry(name, len(data), mtime) for name, (data, mtime) in list(self.objects.items())]

    def delete(self, name):
        self.objects.pop(name, None)

    def sync_folder(self):
        pass


@pytest.mark.parametrize("rank_local_id", [None, "agreed"])
def test_saves_and_loads_need_no_more_than_the_contract(helpers, rank_local_id):
    store = MemoryStore()
    old, new = [{"a": b"1" * 100_000}, {"b": b"2"}], [{"a": b"3" * 400_000}, {"c": b"4"}]
    helpers.save_all(store, old)
    save_id = helpers.save_all(store, new, rank_local_id=rank_local_id, threads=2)
    assert helpers.load_all(store, threads=2) == {"a": b"3" * 400_000, "c": b"4"}
    assert verify_checkpoint(store).ok
    assert all(name == ".metadata" or save_id in name or name.startswith("__") for name in helpers.names(store))
    assert len([name for name in helpers.names(store) if name.endswith(".distcp")]) == 2
    session = SaveSession.begin(store)
    with pytest.raises(SaveInProgressError):
        SaveSession.begin(store)
    session.abort()


def test_a_source_of_requests_asks_the_store():
    store = MemoryStore()
    store.publish("x", b"abcdef")
    source = store.open("x")
    parts = [bytearray(2), bytearray(3)]
    source.read_into(1, [memoryview(part) for part in parts])
    assert parts == [b"bc", b"def"]
    assert source.size() == 6
    source.close()
    with pytest.raises(CorruptCheckpointError):
        source.read_into(5, [memoryview(bytearray(2))])


def test_a_store_with_the_contract_alone_supports_nothing_else():
    store = MemoryStore()
    abilities = SupportsFolders | SupportsPlace | SupportsRanges | SupportsReadPieces | SupportsReadSizes
    assert not isinstance(store, abilities)
    assert not isinstance(store.open("x"), SupportsFetch | SupportsReadAhead)
    with pytest.raises(NotImplementedError, match="a MemoryStore does not support directories"):
        with_folders(store)
    assert (place_of(store), lender_of(store), ReadSizes.of(store)) == (
        "local",
        None,
        ReadSizes(16 << 10, 4 << 10, 4 << 20),
    )


def test_sizes_of_reads_are_those_of_the_store():
    class Far(MemoryStore):
        read_gap_bytes, read_step_bytes, place = 1 << 20, 8 << 20, "remote"

    assert ReadSizes.of(Far()) == ReadSizes(1 << 20, 1 << 20, 8 << 20)
    assert place_of(Far()) == "remote"


@pytest.mark.parametrize("name", ["a", ".metadata", "a/b", "..a", "a..b/c", "ä b"])
def test_names_inside(name):
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "/a", "a/", "a//b", "a/./b", "a/../b", "a\\b", "a\0"])
def test_names_outside(name):
    with pytest.raises(UnsafeCheckpointError, match="do not load it"):
        check_name(name)

from __future__ import annotations

import threading
import time

import pytest

from dcp_io import SaveInProgressError, SaveSession, verify_checkpoint
from dcp_io.stores.store import Entry, Sink, Source, Store, check_name
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError


class MemorySink(Sink):
    def __init__(self, store, name):
        self._store, self._name, self._data = store, name, bytearray()

    @property
    def name(self):
        return self._name

    def tell(self):
        return len(self._data)

    def write(self, buffers):
        for buffer in buffers:
            self._data += buffer

    def close(self, *, sync):
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

    def create(self, name):
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

    def read_into(self, name, offset, buffer):
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


def test_the_plain_source_asks_the_store():
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


def test_a_store_that_opens_objects_reads_ranges_through_them():
    closed = []

    class Opened(Source):
        def read_into(self, offset, buffers):
            MemoryStore.read_into(self._store, self._name, offset, buffers[0])

        def close(self):
            closed.append(self._name)

    class OpeningStore(MemoryStore):
        read_into = Store.read_into

        def open(self, name):
            return Opened(self, name)

    store = OpeningStore()
    store.publish("x", b"abcdef")
    buffer = bytearray(3)
    store.read_into("x", 2, memoryview(buffer))
    assert buffer == b"cde"
    with pytest.raises(CorruptCheckpointError):
        store.read_into("x", 5, memoryview(buffer))
    assert closed == ["x", "x"]


def test_a_store_without_any_way_to_read_ranges_says_so():
    class NoReads(MemoryStore):
        read_into = Store.read_into

    with pytest.raises(NotImplementedError, match="NoReads overrides neither read_into nor open"):
        NoReads().read_into("x", 0, memoryview(bytearray(1)))
    with pytest.raises(NotImplementedError, match="NoReads"):
        NoReads().open("x").read_into(0, [memoryview(bytearray(1))])


def test_a_store_that_writes_no_ranges_says_so():
    store = MemoryStore()
    assert not store.writes_ranges
    for call in (lambda: store.create_sized("x", 1), lambda: store.open_sized("x")):
        with pytest.raises(NotImplementedError, match="MemoryStore does not write ranges"):
            call()


@pytest.mark.parametrize("name", ["a", ".metadata", "a/b", "..a", "a..b/c", "ä b"])
def test_names_inside(name):
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "/a", "a/", "a//b", "a/./b", "a/../b", "a\\b", "a\0"])
def test_names_outside(name):
    with pytest.raises(UnsafeCheckpointError, match="do not load it"):
        check_name(name)

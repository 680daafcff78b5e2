"""An early measurement of the storage's rate: once for each file, after its first bytes are durable."""

from __future__ import annotations

import threading

import pytest

from dcp_io import LocalStore
from dcp_io.requests import Payload, WriteRequest
from dcp_io.stores import local_store
from dcp_io.stores.store import Sink
from dcp_io.writing import data_file, write_engine
from dcp_io.writing.write_engine import write_items
from dcp_manifest.index.items import Framing

SIZE = 300_000


class Gauge:
    def __init__(self, file_bytes):
        self.wanted, self.file_bytes = file_bytes, None
        self.files, self.notes, self.closed = [], [], []
        self._lock = threading.Lock()

    def begin(self, files):
        self.files.append(files)
        self.file_bytes = self.wanted

    def note(self, nbytes, write_seconds, sync_seconds):
        with self._lock:
            self.notes.append((nbytes, write_seconds, sync_seconds))

    def close(self, sync_seconds):
        self.closed.append(sync_seconds)


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(write_engine, "FILE_MIN_BYTES", 1)
    monkeypatch.setattr(data_file, "PACK_BYTES", 1)

    def run(gauge, **options):
        payload = Payload(bytes(SIZE), Framing.RAW, "uint8", (SIZE,))
        requests = [WriteRequest(str(n), SIZE, lambda: payload) for n in range(6)]
        store = LocalStore(tmp_path)
        store.make()
        return write_items(store, requests, prefix="__0_", save_id="x", layout="raw", gauge=gauge, **options)

    return run


@pytest.mark.parametrize("threads", [1, 2])
def test_each_file_is_measured_once_when_its_first_bytes_are_durable(write, monkeypatch, threads):
    synced = []
    real = local_store.os.fdatasync

    def record(fd):
        synced.append(local_store.os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(local_store.os, "fdatasync", record)
    gauge = Gauge(2 * SIZE)
    write(gauge, threads=threads)
    assert gauge.files == [threads]
    assert sorted(nbytes for nbytes, *_ in gauge.notes) == sorted(synced)
    assert len(synced) == len(gauge.closed) == threads
    assert all(2 * SIZE <= nbytes < 3 * SIZE for nbytes in synced)
    assert all(write_seconds > 0 and sync_seconds > 0 for _, write_seconds, sync_seconds in gauge.notes)


@pytest.mark.parametrize("options", [{"single_file": False}, {"threads": 1}])
def test_nothing_is_measured_that_was_not_asked_for(write, options):
    gauge = Gauge(None if "threads" in options else 1)
    write(gauge, **options)
    assert not gauge.notes


def test_without_sync_nothing_is_waited_for(write, monkeypatch):
    monkeypatch.setattr(local_store.os, "fdatasync", lambda fd: pytest.fail("synced"))
    gauge = Gauge(SIZE)
    write(gauge, sync=False)
    assert len(gauge.notes) == 1


def test_a_storage_that_cannot_sync_a_part_notes_nothing(write, monkeypatch):
    monkeypatch.setattr(local_store._LocalSink, "wait_sync", Sink.wait_sync)
    gauge = Gauge(SIZE)
    write(gauge)
    assert not gauge.notes

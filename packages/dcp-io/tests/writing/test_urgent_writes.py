"""Write requests whose bytes come while they are written: they are first, and a failed write ends their wait."""

from __future__ import annotations

import threading

import pytest

from dcp_io import LocalStore
from dcp_io.requests import Payload, WriteRequest
from dcp_io.writing import write_engine
from dcp_io.writing.write_engine import assign_to_threads, write_items
from dcp_manifest.index.items import Framing


class ComingBytes:
    """Bytes that come when the test says so; the wait ends with an error if the write is abandoned."""

    urgent = True
    cost_bytes = 1000

    def __init__(self, key):
        self.key = key
        self.waits, self.abandoned = threading.Event(), threading.Event()

    @property
    def nbytes(self):
        return self.cost_bytes

    def resolve(self):
        return Payload(self, Framing.RAW, "uint8", (self.cost_bytes,))

    def pieces(self, max_bytes):
        self.waits.set()
        assert self.abandoned.wait(20)
        raise RuntimeError("abandoned")
        yield b""  # makes this a generator

    def abandon(self):
        self.abandoned.set()


def request(key, size, resolve=None):
    data = bytes(size)
    return WriteRequest(key, size, resolve or (lambda: Payload(data, Framing.RAW, "uint8", (size,))))


@pytest.mark.parametrize("threads", [1, 2])
def test_urgent_requests_are_the_first_of_every_thread(monkeypatch, threads):
    monkeypatch.setattr(write_engine, "FILE_MIN_BYTES", 1)
    requests = [request("a", 5000), ComingBytes("b"), request("c", 10), ComingBytes("d"), request("e", 3000)]
    buckets = assign_to_threads(requests, threads)
    assert sorted(position for bucket in buckets for position in bucket) == [0, 1, 2, 3, 4]
    for bucket in buckets:
        urgent = [getattr(requests[position], "urgent", False) for position in bucket]
        assert urgent == sorted(urgent, reverse=True)
    assert [sum(position in (1, 3) for position in bucket) for bucket in buckets] == [2 // threads] * threads


def test_a_thread_that_fails_ends_the_wait_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(write_engine, "FILE_MIN_BYTES", 1)
    coming = ComingBytes("coming")

    def fail():
        assert coming.waits.wait(20)
        raise OSError(28, "No space left on device")

    store = LocalStore(tmp_path)
    store.make()
    with pytest.raises(OSError, match="No space left"):
        write_items(store, [coming, request("other", 900, fail)], prefix="__0_", save_id="x", layout="raw", threads=2)
    assert coming.abandoned.is_set()
    assert not list(tmp_path.iterdir())

"""Payloads whose bytes come while they are written: a thread that fails ends the waits of the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dcp_io import LocalStore
from dcp_io.requests import Payload, WriteRequest
from dcp_io.workers import check_stop
from dcp_io.writing import write_engine
from dcp_io.writing.write_engine import write_items
from dcp_manifest.index.columns import Framing


class ComingBytes:
    """Bytes that never come."""

    nbytes = 1000

    def __init__(self) -> None:
        self.waits = threading.Event()

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        assert max_bytes
        self.waits.set()
        while not threading.Event().wait(0.01):
            check_stop()
        yield memoryview(b"")  # makes this a generator


def request(key: str, resolve: Callable[[], Payload]) -> WriteRequest:
    return WriteRequest(key, 1000, resolve)


def test_a_thread_that_fails_ends_the_wait_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_engine, "FILE_MIN_BYTES", 1)
    coming = ComingBytes()

    def fail() -> Payload:
        coming.waits.wait()
        raise OSError(28, "No space left on device")

    store = LocalStore(tmp_path)
    store.make()
    requests = [request("coming", lambda: Payload(coming, Framing.RAW, "uint8", (1000,))), request("other", fail)]
    with pytest.raises(OSError, match="No space left"):
        write_items(store, requests, prefix="__0_", save_id="x", layout="raw", threads=2)
    assert not list(tmp_path.iterdir())


def test_nothing_stops_outside_such_threads() -> None:
    check_stop()

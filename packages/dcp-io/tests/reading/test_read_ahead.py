"""The storage gets a prefetch hint for each range before it is read, and no other hints."""

from __future__ import annotations

import numpy as np
import pytest

from dcp_io import LocalStore
from dcp_io.reading import read_engine
from dcp_io.reading.read_engine import read_items
from dcp_io.requests import ReadRequest
from dcp_io.stores.store import Source
from dcp_io.writing.write_engine import write_items
from dcp_manifest.index.runs import Runs

RNG = np.random.default_rng(1)
SIZES = [5_000_000, 100, 3_000_000, 70_000, 9_000_000]


class Telling(LocalStore):
    """Records hints to its sources and reads, in order: (`told` or `read`, first byte, last byte + 1)."""

    def __init__(self, path):
        super().__init__(path)
        self.log = []

    def open(self, name):
        source, log = super().open(name), self.log

        class Telling(Source):
            def size(self):
                return source.size()

            def will_need(self, offset, size):
                log.append(("told", offset, offset + size))
                source.will_need(offset, size)

            def read_into(self, offset, buffers):
                log.append(("read", offset, offset + sum(map(len, buffers))))
                source.read_into(offset, buffers)

            def close(self):
                source.close()

        return Telling()


@pytest.fixture
def items(store, helpers):
    requests = [helpers.raw_request(f"t{n}", RNG.bytes(size)) for n, size in enumerate(SIZES)]
    return write_items(store, requests, prefix="__0_", save_id="abc", threads=1, sync=False)


def test_every_byte_that_is_read_was_told_once_and_not_long_before(store, items):
    telling = Telling(store.path)
    read_items(telling, [ReadRequest("t", item, 0, item.stored_bytes, None, lambda data: None) for item in items])
    told = [(start, stop) for what, start, stop in telling.log if what == "told"]
    reads = [(start, stop) for what, start, stop in telling.log if what == "read"]
    for start, stop in told:  # each is read in pieces
        while start < stop:
            first, last = reads.pop(0)
            assert first == start
            start = last
        assert start == stop
    assert not reads
    ahead = 0
    for what, _, stop in telling.log:
        ahead += what == "told"
        ahead -= what == "read" and stop in {end for _, end in told}
        assert 0 <= ahead <= read_engine._READS_AHEAD + 1


def test_only_a_store_with_pieces_is_read_in_pieces(store, items, monkeypatch):
    def largest_read():
        telling = Telling(store.path)
        read_items(telling, [ReadRequest("t", item, 0, item.stored_bytes, None, lambda data: None) for item in items])
        return max(stop - start for what, start, stop in telling.log if what == "read")

    assert largest_read() == LocalStore.read_piece_bytes
    monkeypatch.delattr(LocalStore, "read_piece_bytes")  # as a store over a network that prefetches
    assert largest_read() > 4_000_000


def test_of_scattered_parts_nothing_is_told(store, items):
    item = items[0]
    runs = Runs(np.arange(0, 4_000_000, 100_000), 10)
    telling = Telling(store.path)
    read_items(telling, [ReadRequest("t", item, 0, 4_000_000, None, None, lambda *_: None, runs)], verify=False)
    assert {what for what, *_ in telling.log} == {"read"}


def test_telling_of_a_file_that_is_closed_does_nothing(store, items):
    source = store.open(items[0].file)
    source.will_need(0, 1 << 40)
    source.close()
    source.will_need(0, 10)

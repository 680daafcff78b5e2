"""Values on a store, and connections to it."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from dcp_ranks.errors import CoordinatorLostError
from dcp_ranks.transport.chunked_store import CHUNK_BYTES, StoreWire, VanishedKeyError


@pytest.fixture
def wire():
    return StoreWire(dist.HashStore(), "p/", 2)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_values_come_back_and_go_away(size):
    store = dist.HashStore()
    wire = StoreWire(store, "p/", 2)
    data = bytes(range(256)) * (size // 256) + b"w" * (size % 256)
    written = wire.put("key", data)
    assert wire.get("key") == (data, written)
    assert len(written) == (1 if size <= CHUNK_BYTES else -(-size // CHUNK_BYTES) + 1)
    wire.delete(written)
    wire.delete(written)
    assert store.num_keys() == 0


def test_the_first_claim_wins(wire):
    assert not wire.has("key")
    assert wire.claim("key", "a") == "a"
    assert wire.claim("key", "b") == "a"
    assert wire.get_text("key") == "a"
    assert wire.has("key")
    assert not wire.has("key", "other")


def test_counters(wire):
    assert [wire.add("n"), wire.add("n"), wire.add("m")] == [1, 2, 1]


def test_waiting_ends_at_once_or_at_the_deadline(wire):
    assert wire.wait(lambda: True, time.monotonic() - 1)
    assert not wire.wait(lambda: False, time.monotonic() + 0.01)


def test_a_value_that_is_not_there_is_not_waited_for():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    start = time.monotonic()
    with pytest.raises(VanishedKeyError, match="'key'"):
        StoreWire(store, "p/", 2).get("key")
    assert time.monotonic() - start < 60  # the store itself would wait for 300
    assert not store.check(["p/key"])


def test_a_value_that_goes_away_while_it_is_read(wire):
    keys = wire.put("key", bytes(CHUNK_BYTES + 1))
    wire.delete(keys[1:2])
    with pytest.raises(VanishedKeyError, match="'key/1'"):
        wire.get("key")


class Gone:
    """A store that ended: what is connected is told at once."""

    def check(self, keys):
        raise dist.DistNetworkError("gone")


def test_a_lost_store_says_which_key_and_why():
    with pytest.raises(CoordinatorLostError, match=r"key 'a': gone\)"):
        StoreWire(Gone(), "p/", 2).has("a")

"""Ranks listen where they say, and nowhere else; what comes in and proves nothing is few and short."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

import pytest

from dcp_ranks.peers.options import PeerOptions
from dcp_ranks.transport import listening as rank_doors
from dcp_ranks.transport import newcomers as rank_guests
from dcp_ranks.transport.connection import Link, listen
from dcp_ranks.transport.listening import addresses_to_announce, open_doors
from dcp_ranks.transport.newcomers import Guests

OWN = ["192.0.2.7", "10.1.2.3", "2001:db8::7", "127.0.0.1"]


@pytest.fixture(autouse=True)
def own(monkeypatch):
    monkeypatch.setattr(rank_doors, "own_addresses", lambda: OWN)


@pytest.mark.parametrize(
    ("host", "source", "announced"),
    [
        ("10.9.9.9", "10.1.2.3", ["10.1.2.3"]),  # several interfaces: that of the store's network
        ("2001:db8::1", "2001:db8::7", ["2001:db8::7"]),
        ("127.0.0.1", "127.0.0.1", ["127.0.0.1"]),  # all ranks reach it so: they are on this host
        ("localhost", "127.0.0.1", ["127.0.0.1"]),
        ("::1", "127.0.0.1", ["127.0.0.1"]),
        ("myself", "127.0.0.1", OWN),  # 127.0.1.1 of /etc/hosts: others look it up elsewhere
        ("unknown", None, OWN),
        (None, None, OWN),  # a store without a server
    ],
)
def test_what_is_announced(monkeypatch, host, source, announced):
    monkeypatch.setattr(rank_doors, "_source_towards", lambda host, port: source)
    store = SimpleNamespace(underlying_store=SimpleNamespace(host=host, port=1)) if host else object()
    assert addresses_to_announce(store, None) == announced


@pytest.mark.parametrize(
    ("network", "found"),
    [
        ("10.0.0.0/8", ["10.1.2.3"]),
        ("10.1.2.3", ["10.1.2.3"]),
        ("2001:db8::/32", ["2001:db8::7"]),
        ("172.16.0.0/12", []),
    ],
)
def test_a_network_that_was_asked_for(network, found):
    assert addresses_to_announce(object(), network) == found


def test_what_is_no_network_is_refused_on_all_ranks():
    with pytest.raises(ValueError, match="ib0"):
        PeerOptions(network="ib0")


@pytest.mark.parametrize("ports", [(0, 5), (7, 6), (1, 1 << 16), (5,)])
def test_what_is_no_range_of_ports_is_refused(ports):
    with pytest.raises(ValueError, match="first and the last"):
        PeerOptions(ports=ports)


def test_doors_are_in_the_range_that_was_asked_for():
    with listen() as taken:
        first = taken.getsockname()[1]
        doors, announced, port = open_doors(["127.0.0.1"], (first, first + 50))
        with doors[0]:
            assert first < port <= first + 50
            assert (announced, doors[0].getsockname()[1]) == (("127.0.0.1",), port)
        assert open_doors(["127.0.0.1"], (first, first)) == ([], (), 0), "the port is taken"


def test_the_way_to_the_store_sends_nothing_and_knows_this_host():
    assert rank_doors._source_towards("127.0.0.1", 1) == "127.0.0.1"
    assert rank_doors._source_towards("::1", 1) in ("127.0.0.1", None)


def test_doors_are_where_they_are_announced():
    doors, announced, port = open_doors(["192.0.2.1", "127.0.0.1", "127.0.0.2"])  # the first is of no host
    try:
        assert announced == ("127.0.0.1", "127.0.0.2")
        assert [door.getsockname() for door in doors] == [(address, port) for address in announced]
    finally:
        for door in doors:
            door.close()
    assert open_doors(["192.0.2.1"]) == ([], (), 0)


def test_strangers_are_few_and_do_not_stay(monkeypatch):
    monkeypatch.setattr(rank_guests, "MAX_GUESTS", 3)
    guests, strangers = Guests(lambda connection: Link(connection, 60)), []
    with listen() as door:
        strangers += [socket.create_connection(door.getsockname()) for _ in range(5)]
        came = []
        deadline = time.monotonic() + 20
        while len(came) < 5 and time.monotonic() < deadline:
            came += guests.accept(door)
    assert guests.unwelcome() == came[:2]  # the first of too many
    for link in came[:3]:
        guests.forget(link)
    assert guests.unwelcome() == []
    monkeypatch.setattr(rank_guests, "GUEST_SECONDS", -1.0)
    assert guests.unwelcome() == came[3:]
    for end in (*came, *strangers):
        end.close()

"""Ranks listen where they say; two that know one secret find each other, and nobody else gets in or is believed."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_ranks import PeerOptions
from dcp_ranks.transport import listening as rank_doors
from dcp_ranks.transport.connection import Link
from dcp_ranks.transport.listening import (
    Call,
    Guests,
    Listener,
    addresses_to_announce,
    listen,
    open_doors,
    own_addresses,
)

OWN = ["192.0.2.7", "10.1.2.3", "2001:db8::7", "127.0.0.1"]
SECRET, CHALLENGE = b"secret of the job", bytes(range(32))


def listening():
    made = Listener(SECRET)
    made.challenge = CHALLENGE
    return made


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
    monkeypatch.setattr(rank_doors, "MAX_GUESTS", 3)
    guests, strangers = Guests(lambda connection: Link(connection, 60)), []
    with listen() as door:
        strangers += [socket.create_connection(door.getsockname()) for _ in range(5)]
        came = []
        deadline = time.monotonic() + 100
        while len(came) < 5 and time.monotonic() < deadline:
            came += guests.accept(door)
    assert guests.unwelcome() == came[:2]  # the first of too many
    for link in came[:3]:
        guests.forget(link)
    assert guests.unwelcome() == []
    monkeypatch.setattr(rank_doors, "GUEST_TIMEOUT_SECONDS", -1.0)
    assert guests.unwelcome() == came[3:]
    for end in (*came, *strangers):
        end.close()


def test_both_are_believed():
    call = Call(SECRET, CHALLENGE, 3)
    welcome = listening().answer(call.hello, 3)
    assert welcome is not None
    assert call.is_answered_by(welcome)


@pytest.mark.parametrize(
    ("call", "rank"),
    [
        (Call(b"another", CHALLENGE, 3), 3),
        (Call(SECRET, bytes(32), 3), 3),  # meant for another listener
        (Call(SECRET, CHALLENGE, 3), 4),  # of another rank than it says
    ],
    ids=["secret", "challenge", "rank"],
)
def test_who_lacks_something_is_a_stranger(call, rank):
    assert listening().answer(call.hello, rank) is None


def test_a_greeting_is_good_for_once():
    call, listener = Call(SECRET, CHALLENGE, 3), listening()
    assert listener.answer(call.hello, 3) is not None
    assert listener.answer(call.hello, 3) is None


def test_an_answer_is_good_for_one_call():
    first, second = Call(SECRET, CHALLENGE, 3), Call(SECRET, CHALLENGE, 3)
    welcome = listening().answer(first.hello, 3)
    assert welcome is not None
    assert not second.is_answered_by(welcome)
    assert not first.is_answered_by(first.hello[32:])  # what was sent is not an answer


def test_own_addresses_end_with_loopback():
    assert own_addresses()[-1] == "127.0.0.1"
    assert len(set(own_addresses())) == len(own_addresses())


@given(st.binary(max_size=300))
def test_noise_is_neither_a_greeting_nor_an_answer(data):
    assert listening().answer(data, 0) is None
    assert not Call(SECRET, CHALLENGE, 0).is_answered_by(data)


def test_the_secret_is_in_nothing_that_is_sent():
    call = Call(SECRET, CHALLENGE, 3)
    welcome = listening().answer(call.hello, 3) or b""
    assert SECRET not in call.hello + welcome
    assert CHALLENGE not in call.hello + welcome
    assert len({Call(SECRET, CHALLENGE, 3).hello for _ in range(100)}) == 100

"""Ranks connect in any order and within their time, and leave nothing behind."""

from __future__ import annotations

import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dcp_ranks import OperationError, Stream, StreamError, Streams
from dcp_ranks.streams import attempt as attempts
from integration_tests.kits.streams import SECRET, Inbox, connect_all, opened

WAYS = pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])


def together(*calls):
    """Call functions at the same time; returns their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


@WAYS
def test_all_ranks_connect_to_all(local):
    with opened(4, local=local) as made:
        found = connect_all(made)
        for rank, streams in enumerate(found):
            assert {other: stream.rank for other, stream in streams.items()} == {
                other: other for other in range(4) if other != rank
            }
            assert all(stream.same_host == local and stream.lost is None for stream in streams.values())
            assert made[rank].made == streams


@WAYS
def test_the_order_of_the_calls_does_not_matter(local):
    """Each rank waits for another one, in a circle."""
    with opened(3, local=local) as made:

        def connect(rank, order):
            return [made[rank].connect(other, 60).rank for other in order]

        orders = [(0, [1, 2]), (1, [2, 0]), (2, [0, 1])]
        assert together(*(lambda args=args: connect(*args) for args in orders)) == [order for _, order in orders]


def test_a_live_stream_is_returned_again():
    with opened(2) as made:
        first = connect_all(made)[0][1]
        sockets = made[0].sockets
        assert made[0].connect(1, 0.0) is first
        assert made[0].sockets == sockets


@WAYS
def test_a_lost_stream_can_be_made_anew(local):
    with opened(2, local=local) as made:
        first = connect_all(made)
        inboxes = Inbox(), Inbox()
        with made[0].dispatch(inboxes[0]), made[1].dispatch(inboxes[1]):
            first[0][1].lose("a test says so")
            inboxes[0].wait(lambda: inboxes[0].lost)
            inboxes[1].wait(lambda: inboxes[1].lost)
            assert inboxes[0].lost == [(1, "a test says so")]
            second = connect_all(made)
            assert second[0][1] is not first[0][1]
            second[0][1].send(b"here again")
            inboxes[1].wait(lambda: inboxes[1].messages == [(0, b"here again")])


@WAYS
@pytest.mark.parametrize("caller", [0, 1])
def test_a_rank_that_does_not_connect_is_named_when_the_time_is_over(caller, local):
    with opened(2, local=local) as made:
        start = time.monotonic()
        with pytest.raises(
            StreamError, match=rf"connection to rank {1 - caller}: it did not .* within 0\.[34]"
        ) as caught:
            made[caller].connect(1 - caller, 0.3)
        assert caught.value.rank == 1 - caller
        assert time.monotonic() - start < 30
        connect_all(made)  # and it can still come later


def test_connecting_to_several_returns_what_could_be_had():
    with opened(3) as made:
        made[0].close()
        found, _ = together(lambda: made[1].connect_many([0, 2], 60), lambda: made[2].connect(1, 60))
        assert isinstance(found[0], StreamError)
        assert "refused" in found[0].reason
        assert isinstance(found[2], Stream)


def test_a_place_that_others_have_is_left_for_the_next():
    with opened(2) as made:
        cards = [replace(each.card, local=f"dcp-nobody-{os.getpid()}") for each in made]
        cards[0] = replace(cards[0], addresses=("127.0.0.99", *cards[0].addresses))  # nobody listens there
        for each in made:
            each.meet(cards)
        found = connect_all(made)
        assert not found[1][0].same_host
        assert found[1][0].address == f"127.0.0.1:{cards[0].port}" or "127.0.0.99" not in found[1][0].address


def test_an_address_that_swallows_packets_costs_its_share_only(monkeypatch):
    monkeypatch.setattr(attempts, "CONNECT_TIMEOUT_SECONDS", 0.2)
    with opened(2, local=False) as made:
        silent = replace(made[0].card, local="", addresses=("192.0.2.1", *made[0].card.addresses))  # of no network
        made[1].meet([silent, made[1].card])
        found, _ = together(lambda: made[1].connect(0, 60), lambda: made[0].connect(1, 60))
        assert "192.0.2.1" not in found.address


@pytest.mark.parametrize("rank", [0, 7])
def test_ranks_that_cannot_be_meant(rank):
    with opened(2) as made, pytest.raises(OperationError, match=f"rank {rank}|itself"):
        made[0].connect(rank, 1)


def test_after_the_end():
    with opened(1) as made:
        pass
    with pytest.raises(OperationError, match="closed"):
        made[0].connect_many([], 1)
    with pytest.raises(OperationError, match="closed"):
        made[0].dispatch(Inbox())
    made[0].close()
    assert made[0].sockets == 0


def test_the_card_is_small_and_holds_no_secret():
    with Streams(3, SECRET) as streams:
        data = pickle.dumps(streams.card)
        assert pickle.loads(data) == streams.card
        assert len(data) < 1000
        assert SECRET not in data


def resources():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def assert_no_more_than(before):
    """Wait until there are no more descriptors and threads than before; those of earlier tests may end meanwhile."""
    deadline = time.monotonic() + 60
    while any(now > then for now, then in zip(resources(), before, strict=True)):
        assert time.monotonic() < deadline, (resources(), before)
        time.sleep(0.01)


def test_nothing_is_left_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = None
    for number in range(100):
        with opened(3, local=number % 2 == 0) as made:
            found = connect_all(made)
            inboxes = [Inbox() for _ in made]
            for each, inbox in zip(made, inboxes, strict=True):
                each.dispatch(inbox).start()
            found[0][1].send(b"a", [memoryview(bytes(1000))])
            inboxes[1].wait(lambda box=inboxes[1]: box.payloads)
        if number == 0:
            before = resources()
    assert_no_more_than(before)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_over_after_an_error():
    class StopError(Exception):
        pass

    inbox = Inbox()
    before = resources()
    with opened(2) as made:
        connect_all(made)
        with made[0].dispatch(inbox), pytest.raises(StopError), made[1]:
            raise StopError
        inbox.wait(lambda: inbox.lost)
        assert "without a goodbye" in inbox.lost[0][1]  # it may have had more to send
    assert_no_more_than(before)


def test_sockets_are_counted():
    with opened(3) as made:
        listening = [each.sockets for each in made]  # a port that is taken in one family of addresses has one less
        assert min(listening) >= 1
        connect_all(made)
        deadline = time.monotonic() + 60  # who is called counts in a thread of its own
        while [each.sockets for each in made] != [number + 2 for number in listening]:
            assert time.monotonic() < deadline, [each.sockets for each in made]
            time.sleep(0.01)


@pytest.mark.parametrize("method", ["goodbye", "lost"])
def test_a_forked_child_holds_no_connection(method):
    with opened(2) as made:
        found = connect_all(made)
        inbox = Inbox()
        with made[1].dispatch(inbox):
            reader, writer = os.pipe()
            own = [found[0][1].connection.fileno(), *made[0]._doorway.doors]
            child = os.fork()
            if not child:  # it ends only when it is told
                os.close(writer)
                os.read(reader, 1)
                os._exit(made[0].sockets + sum(os.path.exists(f"/proc/self/fd/{number}") for number in own))
            os.close(reader)
            found[0][1].send(b"from the parent")
            inbox.wait(lambda: inbox.messages)
            if method == "goodbye":
                made[0].__exit__(None, None, None)
                inbox.wait(lambda: inbox.left)
            else:
                made[0].close()
                inbox.wait(lambda: inbox.lost)  # the end shows although the child lives
            os.close(writer)
            assert os.waitpid(child, 0)[1] == 0

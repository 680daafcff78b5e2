"""Frames over a real connection, whole or in pieces, and what the kernel is asked for."""

from __future__ import annotations

import socket
import time

import pytest

from dcp_ranks.transport.connection import Frame, Link, listen, own_addresses
from dcp_ranks.transport.mailbox import Mail


@pytest.fixture
def pair():
    with listen() as door:
        left = socket.create_connection(("127.0.0.1", door.getsockname()[1]))
        door.setblocking(True)
        right, _ = door.accept()
    links = Link(left, 60), Link(right, 60)
    yield links
    for link in links:
        link.close()


def receive(link, count, sender=None):
    frames = []
    deadline = time.monotonic() + 20
    while len(frames) < count and time.monotonic() < deadline:
        if sender is not None:
            sender.flush()
        frames += link.receive()
    return frames


def test_frames_of_any_size_arrive_in_order(pair):
    left, right = pair
    left.rank = right.rank = 0
    left._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # wherever this runs
    sent = [Frame(1, 2**40, 3, rank, bytes([rank]) * size) for rank, size in enumerate([0, 1, 10_000_000, 0, 5])]
    for frame in sent:
        left.send(frame)
    assert left.sending  # more than a connection takes at once, and nothing has waited
    assert receive(right, len(sent), left) == sent
    assert not left.sending


def test_a_stranger_may_not_send_much(pair):
    left, right = pair
    left.send(Frame(0, 0, 0, 0, bytes(1000)))
    assert receive_until_broken(right) == "it sent an invalid frame"


def receive_until_broken(link):
    deadline = time.monotonic() + 20
    while link.broken is None and time.monotonic() < deadline:
        list(link.receive())
    return link.broken


def test_the_other_end_closes(pair):
    left, right = pair
    left.send(Frame(1, 1, 1, 1, b"last words"))
    left.close()
    assert [frame.body for frame in receive(right, 1)] == [b"last words"]
    assert receive_until_broken(right) == "its connection was closed"


@pytest.mark.parametrize("seconds", [1_000_000.0, 120.0, 10.0, 1.0])
def test_the_kernel_keeps_the_lease(pair, seconds):
    with socket.socket() as plain:
        link = Link(plain, seconds)
        assert plain.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        asked = [
            plain.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
            for name in ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
        ]
        link.close()
    idle, interval, count, user = asked
    assert user == seconds * 1000
    assert idle >= 1
    assert idle + interval * count <= max(seconds, 5)


def test_own_addresses_end_with_loopback():
    assert own_addresses()[-1] == "127.0.0.1"
    assert len(set(own_addresses())) == len(own_addresses())


def test_mail_is_kept_for_operations_that_run_or_will_run():
    mail = Mail()
    mail.begin(5)
    frames = {number: Frame(1, number, 0, 0, b"") for number in (4, 5, 6)}
    for frame in frames.values():
        mail.put(7, frame)
    assert mail.take((4, 0)) == []  # has ended
    assert mail.take((5, 0)) == [(7, frames[5])]
    assert mail.take((5, 0)) == []
    mail.end(5)
    mail.put(7, frames[5])
    assert mail.take((5, 0)) == []
    assert mail.take((6, 0)) == [(7, frames[6])]


def test_only_little_is_sent_to_a_rank_that_does_not_read():
    mail = Mail()
    mail.begin(1)
    small, large = Frame(1, 1, 0, 0, bytes(10_000)), Frame(1, 1, 1, 0, bytes(100_000))
    for frame in (small, large):
        mail.keep_for_above(frame)
    assert mail.ready_for_above() == [small]
    mail.keep_for_above(small)
    assert mail.ready_for_above() == []  # many small ones are no better than a large one
    mail.asked((1, 1))
    assert mail.ready_for_above() == [large]
    assert mail.take_back((1, 0)) == [small]

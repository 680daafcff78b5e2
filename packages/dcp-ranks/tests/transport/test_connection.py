"""Frames over a real connection, whole or in pieces, and what the kernel is asked for."""

from __future__ import annotations

import socket
import time

import pytest

from dcp_ranks.transport.connection import Frame, Link, Mail, series_number
from dcp_ranks.transport.listening import listen


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
    deadline = time.monotonic() + 100
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
    deadline = time.monotonic() + 100
    while link.broken is None and time.monotonic() < deadline:
        list(link.receive())
    return link.broken


def test_the_other_end_closes(pair):
    left, right = pair
    left.send(Frame(1, 1, 1, 1, b"last words"))
    left.close()
    assert [frame.body for frame in receive(right, 1)] == [b"last words"]
    assert receive_until_broken(right) == "its connection was closed"


@pytest.mark.parametrize(
    ("seconds", "probe", "user"), [(1_000_000.0, 32767, 899_997.5), (120.0, 10, 105.5), (10.0, 1, 6.5), (1.0, 1, 0.5)]
)
def test_the_kernel_keeps_the_lease(pair, seconds, probe, user):
    """Linux looks at the user timeout at each probe, up to an eighth late."""
    with socket.socket() as plain:
        link = Link(plain, seconds)
        assert plain.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        asked = [
            plain.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
            for name in ("KEEPIDLE", "KEEPINTVL", "USER_TIMEOUT")
        ]
        link.close()
    assert asked == [probe, probe, user * 1000]
    assert user + probe * 9 / 8 < max(seconds, 2)


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
    mail.asked.add((1, 1))
    assert mail.ready_for_above() == [large]
    assert mail.take_back((1, 0)) == [small]


def mailed(series: int, sequence: int, body: bytes = b"x") -> Frame:
    return Frame(0, series_number(series, sequence), 1, 3, body)


def kept(mail: Mail, *numbers: tuple[int, int]) -> list[int]:
    """How many frames of each operation there are."""
    return [len(mail.take((series_number(*number), 1))) for number in numbers]


def test_frames_come_before_their_operation_and_not_after_its_end() -> None:
    mail = Mail()
    mail.put(1, mailed(0, 7))
    mail.put(1, mailed(0, 5))  # left out on this rank
    mail.begin(7)
    mail.put(2, mailed(0, 7))
    assert kept(mail, (0, 7)) == [2]
    mail.end(7)
    mail.put(1, mailed(0, 7))
    mail.put(1, mailed(0, 6))  # left out on this rank
    assert kept(mail, (0, 7), (0, 6), (0, 5)) == [0, 0, 0]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_series_that_is_ahead_discards_no_frames_of_others(ahead: int) -> None:
    mail = Mail()
    mail.begin(series_number(ahead, 1000))
    for series in range(3):
        mail.put(1, mailed(series, 2))
    assert kept(mail, (0, 2), (1, 2), (2, 2)) == [int(series != ahead) for series in range(3)]


def test_the_end_of_an_operation_leaves_those_of_other_series() -> None:
    mail = Mail()
    for series in range(2):
        mail.begin(series_number(series, 5))
        mail.put(1, mailed(series, 5))
        mail.keep_for_above(mailed(series, 5))
    mail.end(series_number(1, 5))
    assert kept(mail, (0, 5), (1, 5)) == [1, 0]
    assert [kept.sequence for kept in mail.ready_for_above()] == [5]

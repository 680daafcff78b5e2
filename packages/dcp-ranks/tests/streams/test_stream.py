"""Sending: from the memory that is given, whole, in order, and never longer than the peer deserves."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import threading
import time

import pytest

from dcp_ranks import RanksError, Stream, StreamError
from dcp_ranks.streams.dispatcher import Dispatcher
from integration_tests.kits.streams import Inbox, connect_all, opened

WAYS = pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])


@contextlib.contextmanager
def pair(local=True, **options):
    """A stream, and the inbox at its other end."""
    with opened(2, local=local, **options) as made:
        found = connect_all(made)
        inbox = Inbox()
        with made[1].dispatch(inbox):
            yield found[0][1], inbox


@contextlib.contextmanager
def unread(timeout_seconds=60.0):
    """A stream whose other end is a plain socket that nobody reads."""
    near, far = socket.socketpair()
    stream = Stream(near, 7, "a test", timeout_seconds=timeout_seconds, peer_timeout_seconds=60)
    with far:
        yield stream, far
        stream.close()


@WAYS
@pytest.mark.parametrize("sizes", [[], [0], [1], [0, 5, 0], [3, 1 << 20, 7], [8 << 20], [1] * 3000])
def test_a_payload_of_several_buffers_arrives_as_one(local, sizes):
    buffers = [memoryview(os.urandom(size)) for size in sizes]
    with pair(local) as (stream, inbox):
        stream.send(b"payload", buffers)
        stream.send(b"end")
        inbox.wait(lambda: len(inbox.messages) == 2)
    whole = b"".join(buffers)
    assert [bytes(buffer) for _, _, buffer in inbox.payloads] == ([whole] if whole else [])
    assert inbox.messages == [(0, b"payload"), (0, b"end")]


def test_buffers_of_any_element():
    numbers = memoryview(b"").cast("B"), memoryview(bytes(range(24))).cast("d", (3, 1))
    with pair() as (stream, inbox):
        stream.send(b"", numbers)
        inbox.wait(lambda: inbox.payloads)
        assert inbox.payloads[0][1:] == (b"", bytes(range(24)))
        with pytest.raises(TypeError, match="contiguous"):
            stream.send(b"", [memoryview(bytes(10))[::2]])
        stream.send(b"goes on")
        inbox.wait(lambda: len(inbox.messages) == 2)


@pytest.mark.parametrize("size", [0, 1, 64 << 10])
def test_messages_of_all_sizes(size):
    message = os.urandom(size)
    with pair() as (stream, inbox):
        stream.send(message)
        stream.post(message)
        inbox.wait(lambda: inbox.messages == [(0, message)] * 2)


def test_a_message_that_is_too_long():
    with pair() as (stream, inbox):
        for call in (stream.send, stream.post):
            with pytest.raises(ValueError, match="65537 bytes; a message has at most 65536"):
                call(bytes((64 << 10) + 1))
        stream.send(b"goes on")
        inbox.wait(lambda: inbox.messages == [(0, b"goes on")])


def test_a_descriptor_is_passed_on():
    memory = os.memfd_create("test")
    os.write(memory, b"shared")
    with pair() as (stream, inbox):
        stream.send(b"here", [memoryview(b"payload" * 100_000)], memory)
        stream.send(b"none")
        inbox.wait(lambda: len(inbox.messages) == 2)
        (passed,) = inbox.descriptors
        os.pwrite(passed, b"SHARED", 0)
        assert os.pread(memory, 9, 0) == b"SHARED"
        assert os.get_inheritable(passed) is False
        os.close(passed)
    os.close(memory)


def test_no_descriptor_goes_to_another_host():
    with (
        pair(local=False) as (stream, inbox),
        pytest.raises(ValueError, match="rank 1, which has not proved to be of this host"),
    ):
        stream.send(b"here", (), 0)
    assert not inbox.messages


@WAYS
def test_threads_do_not_mix_their_messages(local):
    count, each = 4, 30
    with pair(local) as (stream, inbox):

        def work(number):
            for index in range(each):
                data = bytes([number]) * (index * 5000)
                stream.send(b"%d %d" % (number, index), [memoryview(data)])
                stream.post(b"%d %d posted" % (number, index))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        inbox.wait(lambda: len(inbox.messages) == count * each * 2)
    for number in range(count):
        own = [message for _, message in inbox.messages if message.startswith(b"%d " % number)]
        assert own == [
            text for index in range(each) for text in (b"%d %d" % (number, index), b"%d %d posted" % (number, index))
        ]
    for _, message, buffer in inbox.payloads:
        number, index = map(int, message.split())
        assert buffer == bytes([number]) * (index * 5000)


def test_a_peer_that_takes_nothing_is_given_up():
    with unread(timeout_seconds=0.2) as (stream, _):
        start = time.monotonic()
        with pytest.raises(StreamError, match="rank 7 at a test: it took no bytes for 0 s: it is stopped") as caught:
            stream.send(b"", [memoryview(bytes(64 << 20))])
        assert time.monotonic() - start < 30
        assert (caught.value.rank, caught.value.address) == (7, "a test")
        for call in (stream.send, stream.post):  # half a message was sent: nothing can follow
            with pytest.raises(StreamError, match="took no bytes"):
                call(b"more")
        assert stream.lost == caught.value.reason


def test_a_slow_peer_is_not_given_up():
    with unread(timeout_seconds=60) as (stream, far):
        sent = threading.Thread(target=stream.send, args=(b"", [memoryview(bytes(4 << 20))]))
        sent.start()
        left = (4 << 20) + 14
        while left:
            left -= len(far.recv(min(left, 512 << 10)))
            time.sleep(0.02)
        sent.join()
        assert stream.lost is None


def test_posting_does_not_wait_for_a_payload():
    with unread() as (stream, far):
        sent = threading.Thread(target=stream.send, args=(b"first", [memoryview(bytes(16 << 20))]))
        sent.start()
        for number in range(100):
            stream.post(b"%d" % number)
        inbox = Inbox()
        far.setblocking(True)
        end = Stream(far, 0, "a test", timeout_seconds=60, peer_timeout_seconds=60)
        dispatcher = Dispatcher(inbox)
        dispatcher.add(end)
        with dispatcher:
            inbox.wait(lambda: len(inbox.messages) == 101)
        sent.join()
    messages = [message for _, message in inbox.messages]
    assert [each for each in messages if each != b"first"] == [b"%d" % number for number in range(100)]


def test_what_is_posted_goes_on_when_the_connection_takes_more():
    """The connection is full, and the dispatcher alone sends the rest."""
    with opened(2) as made:
        found = connect_all(made)
        inboxes = Inbox(), Inbox()
        with made[0].dispatch(inboxes[0]):
            count = 0
            while not found[0][1].is_stuck:
                found[0][1].post(count.to_bytes(8, "little") * 1000)
                count += 1
            for _ in range(50):
                found[0][1].post(count.to_bytes(8, "little") * 1000)
                count += 1
            with made[1].dispatch(inboxes[1]):
                inboxes[1].wait(lambda: len(inboxes[1].messages) == count)
            assert [message[:8] for _, message in inboxes[1].messages] == [
                n.to_bytes(8, "little") for n in range(count)
            ]
            assert not found[0][1].is_stuck


def test_posts_to_a_peer_that_does_not_read_end_in_an_error():
    def post_on(stream):
        for _ in range(10_000):
            stream.post(bytes(64 << 10))

    with unread() as (stream, _), pytest.raises(StreamError, match="more than 4 MiB of messages wait for it"):
        post_on(stream)


@pytest.mark.parametrize("end", ["ours", "theirs"])
def test_nothing_is_sent_after_a_goodbye(end):
    with opened(2) as made:
        found = connect_all(made)
        inboxes = Inbox(), Inbox()
        with made[0].dispatch(inboxes[0]), made[1].dispatch(inboxes[1]):
            found[0][1].send(b"last words")
            found[0][1].goodbye()
            found[0][1].goodbye()
            inboxes[1].wait(lambda: inboxes[1].left == [0])
            assert inboxes[1].messages == [(0, b"last words")]
            stream, said = (
                (found[0][1], "this rank has said goodbye") if end == "ours" else (found[1][0], "takes no more")
            )
            for call in (stream.send, stream.post):
                with pytest.raises(StreamError, match=said):
                    call(b"more")
    assert inboxes[0].lost == inboxes[1].lost == []


def test_closing_ends_a_send():
    with unread() as (stream, far):
        errors = []

        def work():
            try:
                stream.send(b"", [memoryview(bytes(64 << 20))])
            except StreamError as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        far.recv(1)  # it has begun
        stream.close()
        thread.join()
        assert [error.reason for error in errors] == ["this rank has closed it"]


@WAYS
def test_what_was_sent_is_delivered_although_the_sender_is_gone(local):
    """Also if there is something that the sender has not read."""
    with opened(2, local=local) as made:
        found = connect_all(made)
        found[1][0].send(b"never read")
        found[0][1].send(b"read", [memoryview(bytes(50_000))])
        made[0].__exit__(None, None, None)
        inbox = Inbox()
        with made[1].dispatch(inbox):
            inbox.wait(lambda: inbox.left == [0])
        assert inbox.messages == [(0, b"read")]
        assert len(inbox.payloads) == 1
        assert inbox.lost == []


def test_an_interrupt_ends_the_stream_rather_than_mixing_messages():
    class InterruptError(Exception):
        pass

    def interrupt(number, frame):
        raise InterruptError

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        with unread() as (stream, _):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(InterruptError):
                stream.send(b"", [memoryview(bytes(64 << 20))])
            with pytest.raises(StreamError, match="interrupted while it sent"):
                stream.send(b"more")
    finally:
        signal.signal(signal.SIGALRM, old)


def test_the_error_can_be_sent_to_other_ranks():
    error = StreamError(3, "10.0.0.1:5", "it is gone")
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, again.address, again.reason, str(again)) == (3, "10.0.0.1:5", "it is gone", str(error))
    assert str(error) == "connection to rank 3 at 10.0.0.1:5: it is gone"
    assert isinstance(error, RanksError)
    assert isinstance(error, ConnectionError)

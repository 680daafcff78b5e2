"""Receiving: into the memory of the handler, from all ranks at once, and only as much as it wants."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_ranks import OperationError, Stream, StreamError
from dcp_ranks.streams.dispatcher import Dispatcher
from dcp_ranks.streams.reception import Reception
from dcp_ranks.streams.stream import GOODBYE, HEAD, MESSAGE
from integration_tests.kits.streams import Inbox, connect_all, opened

WAYS = pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])


@contextlib.contextmanager
def receiving(inbox):
    """A dispatcher of one stream, and a plain socket as its other end."""
    near, far = socket.socketpair()
    stream = Stream(near, 7, "a test", timeout_seconds=60, peer_timeout_seconds=60)
    dispatcher = Dispatcher(inbox)
    dispatcher.add(stream)
    with far:
        yield dispatcher, stream, far
        dispatcher.drop()
        stream.close()


@WAYS
def test_payloads_go_straight_into_the_memory_that_is_returned(local):
    memory = bytearray(3 << 20)
    inbox = Inbox(buffer_for=lambda size: memoryview(memory)[1000 : 1000 + size])
    with opened(2, local=local) as made:
        found = connect_all(made)
        data = os.urandom(2 << 20)
        with made[1].dispatch(inbox):
            found[0][1].send(b"", [memoryview(data)])
            inbox.wait(lambda: inbox.payloads)
            assert inbox.payloads[0][2].obj is memory
    assert memory[1000 : 1000 + len(data)] == data
    assert not any(memory[:1000])
    assert not any(memory[1000 + len(data) :])


def test_a_payload_that_nobody_wants_is_discarded():
    inbox = Inbox(buffer_for=lambda size: None)
    with opened(2) as made:
        found = connect_all(made)
        with made[1].dispatch(inbox):
            found[0][1].send(b"first", [memoryview(bytes(1_000_001))])
            found[0][1].send(b"second")
            inbox.wait(lambda: [message for _, message in inbox.messages] == [b"first", b"second"])
    assert not inbox.payloads


@WAYS
def test_a_rank_that_is_not_read_waits_alone_and_loses_nothing(local):
    """Its sends block once the connection is full: the memory of the receiver does not grow."""
    allowed = threading.Event()
    inbox = Inbox(may_take=lambda message: allowed.is_set() or not message.startswith(b"large"))
    sent = []
    with opened(3, local=local) as made:
        found = connect_all(made)
        dispatcher = made[0].dispatch(inbox)

        def work():
            for number in range(60):
                found[1][0].send(b"large %d" % number, [memoryview(bytes(1 << 20))])
                sent.append(number)

        thread = threading.Thread(target=work)
        with dispatcher:
            thread.start()
            inbox.wait(lambda: inbox.refused)
            for number in range(50):
                found[2][0].send(b"small %d" % number)
            inbox.wait(lambda: len(inbox.messages) == 50)
            time.sleep(0.2)
            before = len(sent)
            assert before < 40
            assert inbox.refused == 1  # it is not asked again and again
            allowed.set()
            dispatcher.resume(found[0][1])
            inbox.wait(lambda: len(inbox.payloads) == 60)
            thread.join()
    assert [message for _, message, _ in inbox.payloads] == [b"large %d" % number for number in range(60)]


def test_a_handler_may_refuse_again_and_keeps_the_descriptor():
    asked = []
    inbox = Inbox(may_take=lambda message: len(asked) > 2 or asked.append(message))
    with opened(2) as made:
        found = connect_all(made)
        dispatcher = made[1].dispatch(inbox)
        with dispatcher, open("/dev/null") as file:
            found[0][1].send(b"a", [memoryview(b"payload")], file.fileno())
            for refused in (1, 2, 3):
                inbox.wait(lambda refused=refused: inbox.refused == refused)
                dispatcher.resume(found[1][0])
            inbox.wait(lambda: inbox.payloads)
    (descriptor,) = inbox.descriptors
    assert os.fstat(descriptor).st_rdev == os.stat("/dev/null").st_rdev
    os.close(descriptor)
    assert inbox.payloads[0][1:] == (b"a", b"payload")


@WAYS
def test_a_death_is_noticed_while_the_rank_is_not_read(local):
    inbox = Inbox(may_take=lambda message: False)
    with opened(2, local=local) as made:
        found = connect_all(made)
        with made[1].dispatch(inbox):
            found[0][1].send(b"a")
            inbox.wait(lambda: inbox.refused)
            found[0][1].close()
            inbox.wait(lambda: inbox.lost)
    assert inbox.lost[0][0] == 0
    assert "did not receive from it" in inbox.lost[0][1]


def test_a_descriptor_that_no_handler_got_is_closed():
    inbox = Inbox(may_take=lambda message: False)
    with opened(2) as made:
        found = connect_all(made)
        with made[1].dispatch(inbox), open("/dev/null") as file:
            before = len(os.listdir("/proc/self/fd"))
            found[0][1].send(b"a", (), file.fileno())
            inbox.wait(lambda: inbox.refused)
            assert len(os.listdir("/proc/self/fd")) == before + 1
            found[0][1].lose("a test says so")
            inbox.wait(lambda: inbox.lost)
            assert len(os.listdir("/proc/self/fd")) <= before


@WAYS
def test_a_death_in_the_middle_of_a_payload(local):
    inbox = Inbox()
    with opened(2, local=local) as made:
        found = connect_all(made)
        with made[1].dispatch(inbox):
            found[0][1].connection.sendall(HEAD.pack(MESSAGE, 0, 1, 1000) + b"m" + bytes(999))
            inbox.wait(lambda: inbox.messages)
            found[0][1].connection.shutdown(socket.SHUT_RDWR)
            inbox.wait(lambda: inbox.lost)
            with pytest.raises(StreamError, match=r"connection to rank 0 at .* without a goodbye"):
                found[1][0].send(b"")
    assert not inbox.payloads
    assert len(inbox.lost) == 1


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(0, 0, 0, 0),
        HEAD.pack(9, 0, 0, 0),
        HEAD.pack(MESSAGE, 2, 0, 0),
        HEAD.pack(MESSAGE, 0, (64 << 10) + 1, 0),
        HEAD.pack(GOODBYE, 0, 1, 0) + b"x",
        HEAD.pack(GOODBYE, 0, 0, 0) + HEAD.pack(MESSAGE, 0, 0, 0),
        bytes(1000),
        b"\xff" * 1000,
    ],
)
def test_bytes_that_are_no_message_end_the_stream(data):
    inbox = Inbox()
    with receiving(inbox) as (dispatcher, stream, far):
        far.sendall(data)
        dispatcher.run(lambda: inbox.lost)
        assert inbox.lost == [(7, "it sent bytes that are no message")]
        assert stream.lost == "it sent bytes that are no message"
        assert not inbox.messages


def test_a_descriptor_that_is_announced_must_come():
    inbox = Inbox()
    with receiving(inbox) as (dispatcher, _, far):
        far.sendall(HEAD.pack(MESSAGE, 1, 0, 0))
        dispatcher.run(lambda: inbox.lost)
    assert "ulimit -n" in inbox.lost[0][1]


def test_a_descriptor_that_is_not_announced_is_malformed():
    inbox = Inbox()
    before = len(os.listdir("/proc/self/fd"))
    with receiving(inbox) as (dispatcher, _, far), open("/dev/null") as file:
        socket.send_fds(far, [HEAD.pack(MESSAGE, 0, 0, 0)], [file.fileno()])
        dispatcher.run(lambda: inbox.lost)
    assert len(os.listdir("/proc/self/fd")) <= before


@given(st.binary(max_size=200))
def test_noise_never_raises(data):
    inbox = Inbox(buffer_for=lambda size: None)
    with receiving(inbox) as (dispatcher, _, far):
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        dispatcher.run(lambda: inbox.lost or inbox.left)


@pytest.mark.parametrize("buffer", [bytearray(9), bytearray(11), bytes(10)])
def test_a_buffer_that_does_not_fit_is_an_error_of_the_handler(buffer):
    inbox = Inbox(buffer_for=lambda size: buffer)
    with receiving(inbox) as (dispatcher, _, far):
        far.sendall(HEAD.pack(MESSAGE, 0, 0, 10) + bytes(10))
        with pytest.raises(ValueError, match="payload of 10 bytes"):
            dispatcher.run(lambda: inbox.payloads)


def test_what_a_handler_raises_in_the_thread_is_raised_at_the_end():
    class BugError(Exception):
        pass

    class Broken(Inbox):
        def on_message(self, stream, message, payload_bytes, descriptor):
            raise BugError

    with opened(2) as made:
        found = connect_all(made)
        dispatcher = made[1].dispatch(Broken())
        dispatcher.start()
        found[0][1].send(b"")
        while dispatcher.error is None:
            time.sleep(0.01)
        with pytest.raises(BugError):
            made[1].close()


def test_the_end_of_the_receiving_thread_ends_the_streams_of_both_sides(monkeypatch):
    def out_of_memory(self):
        raise MemoryError("no room")

    with opened(2) as made:
        found = connect_all(made)
        monkeypatch.setattr(Reception, "_take_head", out_of_memory)
        inbox = Inbox()
        dispatcher = made[1].dispatch(inbox)
        dispatcher.start()
        found[0][1].send(b"")
        with pytest.raises(MemoryError):  # after the thread has ended
            made[1].close()
        assert [(rank, "MemoryError: no room" in reason) for rank, reason in inbox.lost] == [(0, True)]
        with pytest.raises(StreamError):
            found[0][1].send(b"", [memoryview(bytes(64 << 20))])  # more than sockets buffer


def test_running_in_the_callers_thread():
    inbox = Inbox()
    with opened(2) as made:
        found = connect_all(made)
        dispatcher = made[1].dispatch(inbox)
        found[0][1].send(b"a")
        dispatcher.run(lambda: inbox.messages)
        before = threading.active_count()
        stop = threading.Event()
        other = threading.Thread(target=dispatcher.run, args=(stop.is_set,))
        other.start()
        found[0][1].send(b"b")
        inbox.wait(lambda: len(inbox.messages) == 2)
        with pytest.raises(OperationError, match="another thread"):
            dispatcher.run(lambda: True)
        stop.set()
        dispatcher.wake()
        other.join()
        assert threading.active_count() <= before
        other = threading.Thread(target=dispatcher.run, args=(lambda: False,))
        other.start()
        found[0][1].send(b"c")
        inbox.wait(lambda: len(inbox.messages) == 3)
        dispatcher.close()  # which ends `run`, too
        other.join()
        with pytest.raises(OperationError, match="closed"):
            dispatcher.run(lambda: True)
        with pytest.raises(OperationError, match="dispatcher already"):
            made[1].dispatch(inbox)


def test_a_handler_cannot_close_its_dispatcher():
    class Closing(Inbox):
        def on_message(self, stream, message, payload_bytes, descriptor):
            made[1].close()

    with opened(2) as made:
        found = connect_all(made)
        found[0][1].send(b"a")
        with pytest.raises(OperationError, match="a handler cannot close"):
            made[1].dispatch(Closing()).run(lambda: False)


@WAYS
def test_after_a_goodbye_no_end_of_the_connection_is_a_loss(local):
    """What this rank sent last was never read: the kernel says that the connection was reset."""
    inbox = Inbox()
    with opened(2, local=local) as made:
        found = connect_all(made)
        found[0][1].goodbye()
        found[1][0].send(b"never read", [memoryview(bytes(100_000))])
        found[0][1].connection.close()
        dispatcher = made[1].dispatch(inbox)
        dispatcher.run(lambda: inbox.left and not dispatcher._receptions)
    assert inbox.left == [0]
    assert inbox.lost == []


def test_streams_that_are_made_later_are_received_from_too():
    inbox = Inbox()
    with opened(2) as made, made[1].dispatch(inbox):
        connect_all(made)[0][1].send(b"a")
        inbox.wait(lambda: inbox.messages == [(0, b"a")])


def test_both_directions_at_once():
    """Payloads larger than all buffers, each way, in many streams."""
    data = os.urandom(5 << 20)
    with opened(4) as made:
        found = connect_all(made)
        inboxes = [Inbox() for _ in made]
        for each, inbox in zip(made, inboxes, strict=True):
            each.dispatch(inbox).start()
        threads = [
            threading.Thread(target=stream.send, args=(b"", [memoryview(data)]))
            for own in found
            for stream in own.values()
        ]
        for thread in threads:
            thread.start()
        for inbox in inboxes:
            inbox.wait(lambda inbox=inbox: len(inbox.payloads) == 3)
            assert all(buffer == data for _, _, buffer in inbox.payloads)
        for thread in threads:
            thread.join()

"""Only ranks of the job get in, and are of one host only if they share memory; nobody else disturbs them."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dcp_ranks import StreamError, Streams
from dcp_ranks.streams.greetings import NO_MEMORY, REFUSAL, holds, lend, send_proof, write_greeting
from dcp_ranks.transport import listening
from dcp_ranks.transport.listening import Call, Listener
from integration_tests.kits.streams import SECRET, Inbox, connect_all, opened

WAYS = pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])


def reach(card):
    """Connect to a rank as a stranger."""
    if card.local:
        made = socket.socket(socket.AF_UNIX)
        made.connect(f"\0{card.local}")
    else:
        made = socket.create_connection((card.addresses[-1], card.port))
    made.settimeout(60)
    return made


@contextlib.contextmanager
def answering(streams):
    """A rank waits for the highest rank, which does not come, and answers everybody meanwhile."""
    stop = threading.Event()

    def work():
        while not stop.is_set():
            streams.connect_many([2], 0.1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def reply_to(card, data, *, proof=True):
    """What a rank answers to a greeting; empty if it closes the connection."""
    with reach(card) as guest:
        if proof:
            send_proof(guest, data)
        else:
            guest.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            return guest.recv(100)
        return b""


@WAYS
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_secret_is_refused_by_both(local, wrong):
    secrets = [SECRET, SECRET]
    secrets[wrong] = b"another secret, of another job"
    with Streams(0, secrets[0]) as low, Streams(1, secrets[1]) as high, ThreadPoolExecutor(2) as pool:
        cards = [each.card if local else replace(each.card, local="") for each in (low, high)]
        low.meet(cards)
        high.meet(cards)
        calls = pool.submit(low.connect_many, [1], 1), pool.submit(high.connect_many, [0], 60)
        found = calls[0].result()[1], calls[1].result()[0]
    assert all(isinstance(each, StreamError) for each in found)
    assert "rank 1, but does not know the secret" in found[0].reason
    assert "do all ranks have the same secret (DCP_JOB_SECRET)?" in found[1].reason
    assert not any(secret.decode() in str(each) for secret in secrets for each in found)


@WAYS
def test_a_listener_without_the_secret_is_not_believed(local):
    """Somebody who listens in place of the rank, and answers with anything."""
    with opened(2, local=local) as made, contextlib.ExitStack() as stack:
        name = f"dcp-false-{os.getpid()}"
        door = stack.enter_context(socket.socket(socket.AF_UNIX if local else socket.AF_INET))
        door.bind(f"\0{name}" if local else ("127.0.0.1", 0))
        door.listen()

        def answer():
            guest, _ = door.accept()
            with guest:
                guest.recv(1000)
                guest.sendall(os.urandom(32))
                guest.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        false = made[0].card
        place = {"local": name} if local else {"local": "", "port": door.getsockname()[1]}
        false = replace(false, addresses=() if local else ("127.0.0.1",), **place)
        made[1].meet([false, made[1].card])
        with pytest.raises(StreamError, match="does not know the secret"):
            made[1].connect(0, 60)
        thread.join()


@WAYS
def test_a_greeting_is_good_for_once_and_for_one_rank(local):
    with opened(3, local=local) as made, answering(made[0]):
        card = made[0].card if local else replace(made[0].card, local="")
        call = Call(SECRET, card.challenge, 1)
        assert reply_to(card, write_greeting(2, call.hello)) == REFUSAL
        assert call.is_answered_by(reply_to(card, write_greeting(1, call.hello)))
        assert reply_to(card, write_greeting(1, call.hello)) == REFUSAL
        assert reply_to(card, write_greeting(1, Call(SECRET, bytes(32), 1).hello)) == REFUSAL


def test_who_shares_no_memory_is_not_of_this_host():
    with opened(3) as made, answering(made[0]):
        card = made[0].card
        greeting = write_greeting(1, Call(SECRET, card.challenge, 1).hello)
        assert reply_to(card, greeting, proof=False) == NO_MEMORY  # no descriptor
        with reach(card) as guest, lend(b"something else") as descriptor:
            greeting = write_greeting(1, Call(SECRET, card.challenge, 1).hello)
            socket.send_fds(guest, [greeting], [descriptor])
            with contextlib.suppress(ConnectionResetError):
                assert guest.recv(100) == NO_MEMORY


def test_a_listener_that_shares_no_memory_is_not_of_this_host():
    with opened(2) as made, socket.socket(socket.AF_UNIX) as door:
        name = f"dcp-forward-{os.getpid()}"
        door.bind(f"\0{name}")
        door.listen()
        card = replace(made[0].card, local=name, addresses=())
        listener = Listener(SECRET)
        listener.challenge = card.challenge

        def answer():
            guest, _ = door.accept()
            with guest:
                greeting = guest.recv(1000)
                guest.sendall(listener.answer(greeting[12:], 1) or b"")
                guest.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        made[1].meet([card, made[1].card])
        with pytest.raises(StreamError, match="shares no memory with this rank"):
            made[1].connect(0, 60)
        thread.join()


def forward(door, target):
    """Forward one connection, its bytes alone, as a tunnel to another host does."""
    near, _ = door.accept()
    with near, socket.socket(socket.AF_UNIX) as far, selectors.DefaultSelector() as selector:
        far.connect(target)
        selector.register(near, selectors.EVENT_READ, far)
        selector.register(far, selectors.EVENT_READ, near)
        with contextlib.suppress(OSError):
            while True:
                for key, _ in selector.select():
                    data = key.fileobj.recv(1000)
                    if not data:
                        return
                    key.data.sendall(data)


def test_a_forwarded_unix_socket_proves_nothing():
    """Both ranks have the same boot id, and the socket leads to the other rank."""
    with opened(2) as made, socket.socket(socket.AF_UNIX) as door:
        name = f"dcp-tunnel-{os.getpid()}"
        door.bind(f"\0{name}")
        door.listen()
        tunnel = threading.Thread(
            target=lambda: [forward(door, f"\0{made[0].card.local}") for _ in range(1)], daemon=True
        )
        tunnel.start()
        cards = [replace(made[0].card, local=name), made[1].card]
        for each in made:
            each.meet(cards)
        found = connect_all(made)
        assert found[0][1].same_host is found[1][0].same_host is False  # over TCP
        tunnel.join(60)
        assert not tunnel.is_alive()


@WAYS
def test_strangers_do_not_disturb(monkeypatch, local):
    monkeypatch.setattr(listening, "MAX_GUESTS", 4)
    with opened(3, local=local) as made, contextlib.ExitStack() as stack:
        cards = [each.card if local else replace(each.card, local="") for each in made]
        noise = [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(5000), bytes(76), b"dcpstrm1" + bytes(68)]
        for number in range(40):
            guest = stack.enter_context(reach(cards[0]))
            guest.sendall(noise[number % len(noise)])
        found = connect_all(made)
        inboxes = [Inbox() for _ in made]
        for each, inbox in zip(made, inboxes, strict=True):
            stack.enter_context(each.dispatch(inbox))
        late = stack.enter_context(reach(cards[0]))
        late.sendall(os.urandom(1000))
        for rank in (1, 2):
            found[rank][0].send(b"still here")
        inboxes[0].wait(lambda: sorted(inboxes[0].messages) == [(1, b"still here"), (2, b"still here")])
        assert len(made[0]._doorway.guests.waiting) <= 4


def test_a_descriptor_from_a_stranger_is_closed():
    with opened(3) as made:
        before = len(os.listdir("/proc/self/fd"))
        with answering(made[0]), lend(b"x") as descriptor:
            for data in (b"x" * 10, b"x" * 76):
                with reach(made[0].card) as guest:
                    socket.send_fds(guest, [data], [descriptor] * 3)
                    if len(data) == 76:
                        with contextlib.suppress(ConnectionResetError):
                            assert guest.recv(100) == b""
        made[0].connect_many([1], 0.05)
        assert len(os.listdir("/proc/self/fd")) <= before


def test_nobody_is_waited_for_once_a_rank_is_lost():
    lost = {}
    with opened(4, lost=lambda: lost) as made:
        threading.Timer(0.1, lost.update, [{2: "its process has ended"}]).start()
        start = time.monotonic()
        found = made[1].connect_many([0, 2, 3], 60)
        assert time.monotonic() - start < 50
        assert sorted(found) == [0, 2, 3]
        for rank, error in found.items():
            assert isinstance(error, StreamError)
            assert error.rank == rank
        assert "rank 2 is gone (its process has ended)" in str(found[2])


def test_memory_is_compared_whole():
    with lend(b"content") as descriptor:
        assert holds(descriptor, b"content")
        assert not holds(descriptor, b"conten")
        assert not holds(descriptor, b"contents")
    reader, writer = os.pipe()
    assert not holds(reader, b"content")
    os.close(reader)
    os.close(writer)

"""The thread that sends pieces to another host: in order, with an end, and with errors."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dcp_exchange.transfer import Sender
from dcp_ranks import StreamError

PATIENCE_SECONDS = 60


class Wire:
    """A stream that keeps what is sent, when it is allowed to."""

    rank = 3

    def __init__(self, fails_at: int | None = None, error: Exception | None = None) -> None:
        self.sent: list[tuple[bytes, list[bytes]]] = []
        self.fails_at = fails_at
        self.error = error or StreamError(3, "", "cut on purpose")
        self.open = threading.Event()
        self.reached = threading.Event()

    def send(self, message: bytes, payload: Any) -> None:
        self.reached.set()
        assert self.open.wait(PATIENCE_SECONDS)
        if len(self.sent) == self.fails_at:
            raise self.error
        self.sent.append((message, [bytes(part) for part in payload]))


def started(wire: Wire) -> tuple[Sender, list[Exception], list[int], threading.Event]:
    errors: list[Exception] = []
    done: list[int] = []
    all_done = threading.Event()
    sender = Sender(wire, errors.append)  # type: ignore[arg-type]
    sender.start()
    for number in range(3):

        def finish(number: int = number) -> None:
            done.append(number)
            if number == 2:
                all_done.set()

        sender.send(b"m%d" % number, memoryview(b"p%d" % number), finish)
    return sender, errors, done, all_done


def test_all_is_sent_in_order_and_memory_is_given_back_after_it() -> None:
    wire = Wire()
    sender, errors, done, all_done = started(wire)
    assert wire.reached.wait(PATIENCE_SECONDS)
    assert done == [], "the memory is in use until it is sent"
    wire.open.set()
    assert all_done.wait(PATIENCE_SECONDS)
    sender.end(abort=False)
    sender.join(PATIENCE_SECONDS)
    assert not sender.is_alive()
    assert wire.sent == [(b"m%d" % number, [b"p%d" % number]) for number in range(3)]
    assert (done, errors) == ([0, 1, 2], [])


@pytest.mark.parametrize("error", [StreamError(3, "", "cut on purpose"), MemoryError()], ids=type)
def test_an_error_is_reported_once_and_ends_the_thread(error: Exception) -> None:
    wire = Wire(1, error)
    wire.open.set()
    sender, errors, done, _ = started(wire)
    sender.join(PATIENCE_SECONDS)
    assert not sender.is_alive()
    assert (done, errors) == ([0], [error])


def test_an_end_does_not_wait_for_what_has_not_begun() -> None:
    wire = Wire()
    sender, errors, done, _ = started(wire)
    assert wire.reached.wait(PATIENCE_SECONDS)
    sender.end(abort=False)
    wire.open.set()
    sender.join(PATIENCE_SECONDS)
    assert not sender.is_alive()
    assert ([message for message, _ in wire.sent], done, errors) == ([b"m0"], [0], [])

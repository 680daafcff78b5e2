"""Calls of storages that hang: one wait with a deadline, none for later calls, and one thread for all attempts."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dcp_io.timed_call import TimedCall


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Event for which a storage that hangs waits."""
    monkeypatch.setattr(TimedCall, "SILENT_AFTER_SECONDS", 0.1)
    event = threading.Event()
    yield event
    event.set()


def threads_of(place: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"dcp-io {place}"]


def test_the_result_and_the_error_of_a_call() -> None:
    assert TimedCall("a", lambda: 3).result() == 3
    with pytest.raises(KeyError, match="lost"):
        TimedCall("a", lambda: {}["lost"]).result()


def test_after_one_call_that_hangs_nobody_waits(ends: threading.Event) -> None:
    first = TimedCall("b", ends.wait)
    with pytest.raises(TimeoutError, match="b does not answer"):
        first.result()
    for _ in range(20):
        with pytest.raises(TimeoutError, match="b does not answer"):
            TimedCall("b", ends.wait).result()
    assert len(threads_of("b")) == 1
    assert TimedCall("another place", lambda: 3).result() == 3


def test_a_place_that_answers_again_is_asked_again(ends: threading.Event) -> None:
    first = TimedCall("c", ends.wait)
    with pytest.raises(TimeoutError):
        first.result()
    later = TimedCall("c", lambda: 4)
    ends.set()
    assert first.result(forever=True)
    assert later.result() == 4
    assert TimedCall("c", lambda: 5).result() == 5


def test_who_needs_the_answer_waits_for_calls_before_it(ends: threading.Event) -> None:
    with pytest.raises(TimeoutError):
        TimedCall("d", ends.wait).result()
    later = TimedCall("d", lambda: 4)
    threading.Timer(0.2, ends.set).start()
    assert later.result(forever=True) == 4

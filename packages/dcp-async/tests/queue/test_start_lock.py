"""Threads that begin saves and threads that change values: which thread waits for which, without a deadlock."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dcp_async.errors import NestedSaveError
from dcp_async.queue.start_lock import Entry

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def entry() -> Entry:
    return Entry()


class Holder:
    """Another thread that holds the lock until the test asks it to release the lock."""

    def __init__(self, entry: Entry) -> None:
        self.has, self.over = threading.Event(), threading.Event()
        self._entry = entry
        self.thread = threading.Thread(target=self._hold)
        self.thread.start()

    def _hold(self) -> None:
        with self._entry.lock():
            self.has.set()
            self.over.wait(20)

    def end(self) -> None:
        self.over.set()
        self.thread.join(60)


@pytest.fixture
def holder(entry: Entry) -> Iterator[Holder]:
    made = Holder(entry)
    yield made
    made.end()


def test_nobody_enters_while_another_thread_has_locked(entry: Entry, holder: Holder) -> None:
    assert holder.has.wait(60)
    assert not entry.enter(0.05)
    holder.end()
    assert entry.enter(60)


def test_nobody_locks_while_another_thread_has_entered(entry: Entry) -> None:
    assert entry.enter(0)
    holder = Holder(entry)
    assert not holder.has.wait(0.05)
    entry.leave()
    assert holder.has.wait(60)
    holder.end()


def test_a_thread_locks_and_enters_in_either_order(entry: Entry) -> None:
    with entry.lock(), entry.lock():
        assert entry.locked_here
        assert entry.enter(0)
        entry.leave()
        assert entry.locked_here
    assert entry.enter(0)
    with entry.lock():
        pass
    entry.leave()
    assert not entry.locked_here


def test_a_thread_that_enters_twice_is_told(entry: Entry) -> None:
    assert entry.enter(0)
    with pytest.raises(NestedSaveError, match=r"state_dict\(\)"):
        entry.enter(60)
    entry.leave()
    assert entry.enter(0)


def test_locking_waits_for_all_copies_and_entering_for_none(entry: Entry) -> None:
    assert entry.enter(0)
    first, second = entry.copy_later(), entry.copy_later()
    entry.leave()
    holder = Holder(entry)
    first()
    assert not holder.has.wait(0.05)
    assert entry.enter(0)
    entry.leave()
    second()
    assert holder.has.wait(60)
    holder.end()

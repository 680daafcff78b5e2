"""The queue of saves, and the lock that starts of saves take."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dcp_async.errors import SaverClosedError, SaverDeadlineError
from dcp_async.queue.jobs import SaveJob
from dcp_async.queue.save_agreement import GroupLink, Seat, Ticket
from dcp_async.queue.save_queue import Entry, SaveQueue
from dcp_core import CoordinatorLostError, Metadata, PeerOptions
from dcp_core.errors import OperationError, SaveSkippedError


class Link(GroupLink):
    """Records withdrawn saves; can simulate a lost store."""

    def __init__(self) -> None:
        super().__init__(Seat("alone", 0, 0, 1, 1, False, None, 10.0, PeerOptions()))
        self.withdrawn: list[BaseException] = []
        self.lost: Exception | None = None

    def decide(self, ticket: Ticket, wish: str) -> str:
        if self.lost is not None:
            raise self.lost
        return wish

    def withdraw(self, ticket: Ticket, error: BaseException) -> None:
        self.withdrawn.append(error)


class Gate:
    """Carries out saves when the test allows it."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.begun: list[Any] = []
        self.queue = SaveQueue(self.run, "test", 250.0)

    def run(self, job: SaveJob) -> Any:
        self.begun.append(job.checkpoint_id)
        self.entered.set()
        assert self.open.wait(100)
        if str(job.checkpoint_id).startswith("bad"):
            raise OSError(job.checkpoint_id)
        return Metadata({})


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()
    made.queue.close()


def _job(name: str, link: Link | None = None, *, latest: bool = False) -> SaveJob:
    """A save whose copy is complete."""
    used = link or Link()
    job = SaveJob(used, used.draw(), name, None, None, True)
    job.may_be_superseded = latest
    job.staging.set_result(None)
    return job


def test_a_store_that_is_gone_fails_the_save_that_was_to_begin(gate: Gate) -> None:
    link, released = Link(), threading.Event()
    link.lost = CoordinatorLostError("the store is gone")
    job = _job("a", link, latest=True)
    job.done.append(released.set)
    gate.queue.put(job)
    with pytest.raises(CoordinatorLostError, match="gone"):
        job.future.result(timeout=250)
    gate.queue.drain(60)
    assert released.is_set()
    assert not gate.begun


def test_futures_cannot_be_cancelled_while_the_save_goes_on(gate: Gate) -> None:
    job = _job("a")
    gate.queue.put(job)
    assert not job.future.cancel()

    async def wait_a_little() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(job.future), 0.01)

    asyncio.run(wait_a_little())
    assert not SaveJob(job.link, job.ticket, "b", None, None, True).staging.cancel()
    gate.open.set()
    assert job.future.result(timeout=250) == Metadata({})


def test_each_failure_that_nobody_asked_about_is_raised(gate: Gate) -> None:
    gate.open.set()
    for name in ("bad 1", "good", "bad 2"):
        gate.queue.put(_job(name))
        gate.queue.drain(60)
    for name in ("bad 1", "bad 2"):
        with pytest.raises(OSError, match=name):
            gate.queue.raise_unasked()
    gate.queue.raise_unasked()


@pytest.mark.parametrize("latest", [True, False])
def test_only_saves_of_that_policy_are_superseded(gate: Gate, latest: bool) -> None:
    gate.queue.put(_job("a"))
    assert gate.entered.wait(60)
    waiting = _job("b", latest=latest)
    gate.queue.put(waiting)
    if not latest:
        threading.Timer(0.2, gate.open.set).start()
    assert gate.queue.admit(_job("c", latest=True), "latest")
    gate.open.set()
    if latest:
        with pytest.raises(SaveSkippedError):
            waiting.future.result(timeout=250)
    else:
        assert waiting.future.result(timeout=250) == Metadata({})


def test_nothing_waits_after_a_save_that_could_not_be_put(gate: Gate) -> None:
    gate.queue._thread.shutdown()  # as when the interpreter ends
    with pytest.raises(RuntimeError, match="shutdown"):
        gate.queue.put(_job("a"))
    gate.queue.drain(1)
    gate.queue.close()
    with pytest.raises(SaverClosedError):
        gate.queue.put(_job("b"))


def test_a_dropped_save_is_left_out_on_all_ranks(gate: Gate) -> None:
    gate.queue.put(_job("a"))
    assert gate.entered.wait(60)
    link, released = Link(), threading.Event()
    waiting = _job("b", link)
    waiting.done.append(released.set)
    gate.queue.put(waiting)
    gate.queue.close()
    gate.queue.drop()
    with pytest.raises(SaverClosedError, match="save to b was left out"):
        waiting.future.result(timeout=250)
    assert [type(error) for error in link.withdrawn] == [SaverClosedError]
    assert released.is_set()
    gate.open.set()
    gate.queue.drain(60)
    assert gate.begun == ["a"]


@pytest.mark.parametrize("overlap", ["wait", "latest"])
def test_waiting_for_an_earlier_save_has_an_end(gate: Gate, overlap: Any) -> None:
    gate.queue._save_timeout_seconds = 0.05
    gate.queue.put(_job("a"))
    assert gate.entered.wait(60)
    gate.queue.put(_job("b"))
    with pytest.raises(SaverDeadlineError, match=r"the save to a was not done after 0\.05 s"):
        gate.queue.admit(_job("c"), overlap)


def test_waiting_for_the_copy_of_a_save_has_an_end(gate: Gate) -> None:
    gate.queue._save_timeout_seconds = 0.05
    gate.queue.put(_job("a"))
    assert gate.entered.wait(60)
    link = Link()
    copying = SaveJob(link, link.draw(), "b", None, None, True, may_be_superseded=True)
    gate.queue.put(copying)
    with pytest.raises(SaverDeadlineError, match="the copy for the save to b"):
        gate.queue.admit(_job("c"), "latest")
    copying.staging.set_result(None)


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
            self.over.wait(100)

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
    with pytest.raises(OperationError, match=r"state_dict\(\)"):
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

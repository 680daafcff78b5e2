"""Which saves begin, wait or are skipped, and errors that were never read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dcp_async.errors import SaverClosedError, SaverDeadlineError, SaveSupersededError
from dcp_async.queue.jobs import SaveJob
from dcp_async.queue.rank_place import Seat, Ticket
from dcp_async.queue.save_agreement import GroupLink
from dcp_async.queue.save_queue import SaveQueue
from dcp_core import CoordinatorLostError, Metadata, PeerOptions


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
        self.queue = SaveQueue(self.run, "test")

    def run(self, job: SaveJob) -> Any:
        self.begun.append(job.checkpoint_id)
        self.entered.set()
        assert self.open.wait(20)
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
        job.future.result(timeout=60)
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
    assert job.future.result(timeout=60) == Metadata({})


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
        with pytest.raises(SaveSupersededError):
            waiting.future.result(timeout=60)
    else:
        assert waiting.future.result(timeout=60) == Metadata({})


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
        waiting.future.result(timeout=60)
    assert [type(error) for error in link.withdrawn] == [SaverClosedError]
    assert released.is_set()
    gate.open.set()
    gate.queue.drain(60)
    assert gate.begun == ["a"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("overlap", ["wait", "latest"])
def test_waiting_for_an_earlier_save_has_an_end(gate: Gate, overlap: Any) -> None:
    gate.queue._save_seconds = 0.05
    gate.queue.put(_job("a"))
    assert gate.entered.wait(60)
    gate.queue.put(_job("b"))
    with pytest.raises(SaverDeadlineError, match=r"the save to a was not done after 0\.05 s"):
        gate.queue.admit(_job("c"), overlap)


@pytest.mark.timeout(30)
def test_waiting_for_the_copy_of_a_save_has_an_end(gate: Gate) -> None:
    gate.queue._save_seconds = 0.05
    gate.queue.put(_job("a"))
    assert gate.entered.wait(60)
    link = Link()
    copying = SaveJob(link, link.draw(), "b", None, None, True, may_be_superseded=True)
    gate.queue.put(copying)
    with pytest.raises(SaverDeadlineError, match="the copy for the save to b"):
        gate.queue.admit(_job("c"), "latest")
    copying.staging.set_result(None)

"""Messages of a process saver to its worker, and reactions to the answers."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from dcp_async.errors import SaverClosedError, WorkerError, WorkerLostError
from dcp_async.options import SaverOptions
from dcp_async.queue.jobs import SaveJob
from dcp_async.queue.save_agreement import GroupLink, Seat, Ticket
from dcp_async.savers.process_saver import ProcessBackend
from dcp_async.savers.worker_messages import Failed, ForgetArena, Save, Saved
from dcp_async.staging.arenas import ArenaPool
from dcp_async.staging.copy_state import Copier, Stager
from dcp_core import PeerOptions
from dcp_ranks.phases.phases import failure_of


class FakeWorker:
    """Answers each save as the test has set."""

    alive = True

    def settle(self) -> None: ...

    def wait_ready(self) -> None: ...

    def __init__(self, *fates: Any) -> None:
        self.fates = [*fates]
        self.messages: list[Any] = []
        self.killed = False

    def send(self, message: Any, descriptor: int | None = None) -> None:
        self.messages.append(message)
        if isinstance(message, Save) and self.fates[0] == "unsendable":
            self.fates.pop(0)
            raise TypeError("cannot pickle that")

    def read(self, deadline: float, **_: Any) -> Any:
        fate = self.fates.pop(0)
        if isinstance(fate, WorkerLostError):
            raise fate
        number = self.saves[-1].number
        if fate == "saved":
            return Saved(number, "id", None)
        error = ValueError("no")
        return Failed(number if fate == "failed" else 0, failure_of(0, error))

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None: ...

    @property
    def saves(self) -> list[Save]:
        return [message for message in self.messages if isinstance(message, Save)]


class Link(GroupLink):
    def __init__(self) -> None:
        super().__init__(Seat("alone", 0, 0, 1, 1, False, None, 10.0, PeerOptions()))
        self.withdrawn: list[BaseException] = []

    def withdraw(self, ticket: Ticket, error: BaseException) -> None:
        self.withdrawn.append(error)


def _backend(*fates: Any) -> tuple[ProcessBackend, FakeWorker, Link, Stager]:
    backend, worker = ProcessBackend(SaverOptions()), FakeWorker(*fates)
    backend._worker = worker  # type: ignore[assignment]
    return backend, worker, Link(), Stager(ArenaPool(shared=False, pinned=False), Copier(1))


def _job(link: Link, stager: Stager, step: Any) -> SaveJob:
    job = SaveJob(link, link.draw(), "place", None, None, True)
    job.staged = stager.stage({"w": torch.ones(3), "step": step})
    return job


def test_only_what_has_changed_is_sent() -> None:
    backend, worker, link, stager = _backend("saved", "saved", "saved")
    for step in (1, 1, 2):
        backend.run(_job(link, stager, step))
    assert [list(save.objects.values()) for save in worker.saves] == [[1], [], [2]]
    assert [save.means is None for save in worker.saves] == [False, True, True]


NAN = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8000000000000, 0x7FF8000000000001)]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (0.0, -0.0), (0j, complex(-0.0, 0.0)), (1, True), (1, 1.0), (NAN[0], NAN[1]), ("a", b"a"), (None, False),
        ((1,), (True,)), (np.float64(0.0), np.float64(-0.0)), (np.float64(1.0), 1.0), ({1}, frozenset({1})),
        (([0.0],), ([-0.0],)),
    ],
)  # fmt: skip
def test_what_is_equal_but_of_other_bits_or_type_has_changed(before: Any, now: Any) -> None:
    """For example `0.0 == -0.0`: two values are the same only if the same bytes would be stored."""
    backend, worker, link, stager = _backend("saved", "saved", "saved")
    for value in (before, now, now):
        backend.run(_job(link, stager, value))
    first, second, third = (save.objects for save in worker.saves)
    assert (len(first), len(second), len(third)) == (1, 1, 0)


@pytest.mark.parametrize("fate", ["failed", "unsendable", WorkerLostError("silent")])
def test_after_a_failure_everything_is_sent_again(fate: Any) -> None:
    backend, worker, link, stager = _backend("saved", fate, "saved")
    backend.run(_job(link, stager, 1))
    with pytest.raises((ValueError, TypeError, WorkerLostError)):
        backend.run(_job(link, stager, 2))
    backend.run(_job(link, stager, 2))
    assert list(worker.saves[-1].objects.values()) == [2]
    assert worker.saves[-1].means is not None


def test_what_cannot_be_sent_fails_on_the_other_ranks_too() -> None:
    backend, _, link, stager = _backend("unsendable")
    with pytest.raises(TypeError, match="cannot pickle"):
        backend.run(_job(link, stager, 1))
    assert [type(error) for error in link.withdrawn] == [TypeError]


def test_a_message_that_the_worker_does_not_understand_ends_it_and_says_why() -> None:
    backend, worker, link, stager = _backend("not understood")
    with pytest.raises(ValueError, match="no") as raised:
        backend.run(_job(link, stager, 1))
    assert isinstance(raised.value.__cause__, WorkerError)
    assert worker.killed
    assert link.withdrawn == [raised.value]


def test_no_worker_is_started_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(
        "dcp_async.savers.process_saver.WorkerProcess", lambda *_: started.append(1) or FakeWorker("saved")
    )
    backend, _, link, stager = _backend()
    backend.close()
    with pytest.raises(SaverClosedError):
        backend.run(_job(link, stager, 1))
    assert not started


def test_the_worker_lets_go_of_arenas_that_are_dropped() -> None:
    backend, worker, link, stager = _backend("saved", "saved", "saved")
    jobs = [_job(link, stager, step) for step in range(3)]
    arenas = [job.staged.arena for job in jobs if job.staged is not None]
    backend.run(jobs[0])
    backend.run(jobs[1])
    arenas[0].close()
    backend.run(jobs[2])
    assert [save.arena for save in worker.saves] == [0, 1, 2]
    assert ForgetArena(0) in worker.messages
    assert list(backend._known.arenas) == arenas[1:]


def test_the_first_worker_starts_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[FakeWorker] = []

    def start(*_: Any) -> FakeWorker:
        started.append(FakeWorker("saved"))
        return started[-1]

    monkeypatch.setattr("dcp_async.savers.process_saver.WorkerProcess", start)
    backend, link, stager = (
        ProcessBackend(SaverOptions()),
        Link(),
        Stager(ArenaPool(shared=False, pinned=False), Copier(1)),
    )
    backend.before_save()
    assert len(started) == 1
    backend.before_save()
    backend.run(_job(link, stager, 1))
    assert len(started) == 1
    backend.close()
    backend.before_save()
    assert len(started) == 1


def test_a_worker_that_cannot_be_started_fails_in_its_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> FakeWorker:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("dcp_async.savers.process_saver.WorkerProcess", start)
    backend, link = ProcessBackend(SaverOptions()), Link()
    backend.before_save()
    with pytest.raises(BlockingIOError, match="no more processes"):
        backend.run(_job(link, Stager(ArenaPool(shared=False, pinned=False), Copier(1)), 1))
    assert [type(error) for error in link.withdrawn] == [BlockingIOError]

"""The function `async_save`: its results, the saver that it uses, and where errors are raised."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
import torch

from dcp_async import (
    AsyncCheckpointerType,
    AsyncSaver,
    AsyncSaveResponse,
    DefaultStager,
    SaverClosedError,
    SaverDeadlineError,
    SaverOptions,
    SaveSkippedError,
    WorkerError,
    WorkerOptions,
    async_save,
)
from dcp_async.saver import _at_exit, close_savers, shared_saver
from dcp_core import BlockingAsyncStager, load
from dcp_core.errors import NotEnoughMemoryError, OperationError
from integration_tests.kits.memory import MemoryReader, MemoryWriter, files_in
from integration_tests.kits.memory_store import OBJECTS


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    GatedWriter.entered.clear()
    GatedWriter.gate.clear()
    yield
    close_savers()
    OBJECTS.clear()


class GatedWriter(MemoryWriter):
    """Writes when the test allows it."""

    entered, gate = threading.Event(), threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.entered.set()
        self.gate.wait(100)
        return super().write_data(plan, planner)


def _loaded(folder: str) -> float:
    found = {"w": torch.zeros(4)}
    load(found, storage_reader=MemoryReader(folder))
    return found["w"][0].item()


def test_a_thread_by_default_and_a_future_of_metadata() -> None:
    weight = torch.ones(4)
    future = async_save({"w": weight}, storage_writer=MemoryWriter("a"))
    weight.zero_()
    assert isinstance(future, Future)
    assert list(future.result().state_dict_metadata) == ["w"]
    assert _loaded("a") == 1.0
    assert shared_saver(AsyncCheckpointerType.THREAD) is shared_saver("thread")


def test_a_stager_that_gives_futures_gives_a_response() -> None:
    answer = async_save({"w": torch.ones(4)}, storage_writer=MemoryWriter("a"), async_stager=DefaultStager())
    assert isinstance(answer, AsyncSaveResponse)
    assert answer.staging_completion.result() is None
    assert list(answer.upload_completion.result().state_dict_metadata) == ["w"]


def test_a_response_can_be_subclassed_and_changed() -> None:
    """As code for stock does: an `__init__` that sets both futures, further attributes, another future."""

    class Response(AsyncSaveResponse):
        def __init__(self, upload: Future[Any]) -> None:
            self.upload_completion = upload
            self.staging_completion = Future()
            self.note = "mine"

    response = Response(Future())
    response.upload_completion = Future()
    response.upload_completion.set_result(None)  # type: ignore[arg-type]
    assert response.upload_completion.result() is None
    assert dataclasses.astuple(AsyncSaveResponse(1, 2)) == (1, 2)  # type: ignore[arg-type]


def test_stagers_of_the_callers_own_are_used() -> None:
    class Doubling(BlockingAsyncStager):
        def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {key: value * 2 for key, value in state_dict.items()}

    async_save({"w": torch.ones(4)}, storage_writer=MemoryWriter("a"), async_stager=Doubling()).result()  # type: ignore[union-attr]
    assert _loaded("a") == 2.0


def test_a_stager_that_fails_later_fails_both_futures() -> None:
    class Late:
        should_synchronize_after_execute = False
        _synchronize_after_execute = False

        def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
            failed: Future[dict[str, Any]] = Future()
            failed.set_exception(OSError("no memory left"))
            return failed

        def synchronize_staging(self) -> None: ...

        def close(self) -> None: ...

    answer = async_save({"w": torch.ones(4)}, storage_writer=MemoryWriter("a"), async_stager=Late())
    assert isinstance(answer, AsyncSaveResponse)
    for future in (answer.staging_completion, answer.upload_completion):
        with pytest.raises(OSError, match="no memory left"):
            future.result(timeout=250)


def test_overlap_is_chosen_by_call() -> None:
    first = async_save({"w": torch.ones(4)}, storage_writer=GatedWriter("a"))
    second = async_save({"w": torch.ones(4)}, storage_writer=MemoryWriter("b"), overlap="skip")
    with pytest.raises(SaveSkippedError, match="was skipped"):
        second.result()  # type: ignore[union-attr]
    GatedWriter.gate.set()
    first.result()  # type: ignore[union-attr]
    assert not files_in("b")


def test_a_copy_is_not_overwritten_while_it_is_read() -> None:
    weight = torch.ones(4)
    with AsyncSaver("thread", overlap="latest") as saver:
        saver.save({"w": weight}, storage_writer=GatedWriter("a"))
        assert GatedWriter.entered.wait(100)  # one that has not begun would be superseded
        weight.fill_(2)
        saver.save({"w": weight}, storage_writer=MemoryWriter("b"))
        GatedWriter.gate.set()
    assert (_loaded("a"), _loaded("b")) == (1.0, 2.0)


def test_the_limit_for_copies_is_hard() -> None:
    with AsyncSaver("thread", options=SaverOptions(max_staging_bytes=1 << 16)) as saver:
        with pytest.raises(NotEnoughMemoryError, match="max_staging_bytes=65,536"):
            saver.save({"w": torch.ones(1 << 15)}, storage_writer=MemoryWriter("a"))
        saver.save({"w": torch.ones(1 << 14)}, storage_writer=MemoryWriter("a")).result()  # type: ignore[union-attr]
        assert saver.staging_bytes == 1 << 16


def test_close_drains_with_a_deadline_and_refuses_more() -> None:
    saver = AsyncSaver("thread")
    running = saver.save({"w": torch.ones(4)}, storage_writer=GatedWriter("a"))
    waiting = saver.save({"w": torch.ones(4)}, storage_writer=MemoryWriter("b"), overlap="latest")
    with pytest.raises(SaverDeadlineError, match=r"save to .* was still running"):
        saver.close(0.05)
    with pytest.raises(SaverClosedError):
        saver.save({"w": torch.ones(4)}, storage_writer=MemoryWriter("b"))
    with pytest.raises(SaverClosedError, match="left out"):
        waiting.result()  # type: ignore[union-attr]
    GatedWriter.gate.set()
    running.result()  # type: ignore[union-attr]
    assert not files_in("b")


def test_errors_reach_the_future_or_the_next_save() -> None:
    class Failing(MemoryWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            raise OSError("disk gone")

    asked = async_save({"w": torch.ones(4)}, storage_writer=Failing("a"))
    with pytest.raises(OSError, match="disk gone"):
        asked.result()  # type: ignore[union-attr]
    async_save({"w": torch.ones(4)}, storage_writer=Failing("a"))
    with pytest.raises(OSError, match="disk gone"):
        async_save({"w": torch.ones(4)}, storage_writer=MemoryWriter("b"))
    async_save({"w": torch.ones(4)}, storage_writer=MemoryWriter("b")).result()  # type: ignore[union-attr]


def test_settings_of_a_shared_saver_do_not_change() -> None:
    saver = shared_saver("thread", SaverOptions(copy_threads=1))
    assert shared_saver("thread") is saver
    with pytest.raises(ValueError, match="close_savers"):
        shared_saver("thread", SaverOptions(copy_threads=2))


def test_unknown_savers_are_named() -> None:
    with pytest.raises(ValueError, match="'fiber' is not a kind of saver: pass 'process' or 'thread'"):
        AsyncSaver("fiber")


def test_a_worker_that_cannot_start_says_why() -> None:
    options = SaverOptions(worker=WorkerOptions(cpu_affinity=(4095,)))
    with AsyncSaver("process", options=options) as saver:
        with pytest.raises(WorkerError, match="could not be started"):
            saver.warm_up()
        failed = saver.save({"w": torch.ones(4)}, storage_writer=MemoryWriter("a"))
        assert isinstance(failed.exception(), WorkerError)  # type: ignore[union-attr]


def test_warm_up_makes_the_memory_and_saves_nothing() -> None:
    state = {"w": torch.ones(1 << 14), "step": 0}
    with AsyncSaver("thread") as saver:
        saver.warm_up(state_dict=state)
        assert saver.staging_bytes == 1 << 16
        assert not OBJECTS
        saver.save(state, storage_writer=MemoryWriter("a")).result()  # type: ignore[union-attr]
        assert saver.staging_bytes == 1 << 16
    with pytest.raises(SaverClosedError):
        saver.warm_up()


def test_a_save_that_meets_the_end_of_its_saver_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    saver, withdrawn = AsyncSaver("thread"), list[BaseException]()
    link = saver._links.of(None, no_dist=False)
    monkeypatch.setattr(link, "withdraw", lambda _, error: withdrawn.append(error))
    stage = saver._copies.stage

    def closing(*arguments: Any) -> Any:
        staged = stage(*arguments)
        saver._queue.close()  # another thread, at the worst moment
        return staged

    monkeypatch.setattr(saver._copies, "stage", closing)
    with pytest.raises(SaverClosedError):
        saver.save({"w": torch.ones(4)}, storage_writer=MemoryWriter("a"))
    assert [type(error) for error in withdrawn] == [SaverClosedError]
    assert not saver._pool._taken
    saver.close()


class Failing(MemoryWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        raise OSError(f"disk of {self.checkpoint_id} gone")


def test_what_nobody_asked_about_is_logged_at_exit(caplog: pytest.LogCaptureFixture) -> None:
    async_save({"w": torch.ones(4)}, storage_writer=Failing("a"))
    shared_saver("thread").wait()
    _at_exit()
    assert [(record.levelname, str(record.exc_info[1])) for record in caplog.records if record.exc_info] == [
        ("ERROR", "disk of a gone")
    ]


def test_close_raises_the_first_failure_and_logs_the_others(caplog: pytest.LogCaptureFixture) -> None:
    saver, failed = AsyncSaver("thread"), list[Any]()
    for name in ("a", "b"):
        saver.save({"w": torch.ones(4)}, storage_writer=Failing(name))
        saver.wait()
        failed += saver._queue._failed
        saver._queue._failed.clear()  # as if the next save had been started before this one failed
    saver._queue._failed += failed
    with pytest.raises(OSError, match="disk of a gone"):
        saver.close()
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["disk of b gone"]


def test_a_save_inside_lock_makes_its_copy_at_once() -> None:
    weight = torch.ones(4)
    with AsyncSaver("thread") as saver:
        with saver.lock():
            answer = saver.save({"w": weight}, storage_writer=MemoryWriter("a"), async_stager=DefaultStager())
            assert isinstance(answer, AsyncSaveResponse)
            assert answer.staging_completion.done()
            weight.zero_()
        answer.upload_completion.result()
    assert _loaded("a") == 1.0


@pytest.mark.parametrize("later", [False, True])
def test_two_threads_that_save_one_of_them_inside_lock(later: bool) -> None:
    """Neither thread waits for a lock that the other one holds: the thread inside `lock` goes first."""
    weight, locked, saved = torch.ones(4), threading.Event(), threading.Event()
    with AsyncSaver("thread") as saver:

        def save_unlocked() -> None:
            assert locked.wait(100)
            stager = DefaultStager() if later else None
            saver.save({"w": weight}, storage_writer=MemoryWriter("b"), async_stager=stager)
            saved.set()

        other = threading.Thread(target=save_unlocked)
        other.start()
        with saver.lock():
            locked.set()
            assert not saved.wait(0.1)  # it waits for this lock by now
            saver.save({"w": weight}, storage_writer=MemoryWriter("a"))
            weight.fill_(2)
        assert saved.wait(100)
        other.join(60)
    assert (_loaded("a"), _loaded("b")) == (1.0, 2.0)


def test_a_save_inside_a_state_dict_is_refused() -> None:
    class Saving:
        def state_dict(self) -> dict[str, Any]:
            saver.save({"w": torch.ones(4)}, storage_writer=MemoryWriter("a"))
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    with AsyncSaver("thread") as saver:
        with pytest.raises(OperationError):
            saver.save({"s": Saving()}, storage_writer=MemoryWriter("b"))
        saver.save({"w": torch.ones(4)}, storage_writer=MemoryWriter("c")).result()  # type: ignore[union-attr]
    assert _loaded("c") == 1.0


def test_who_hears_that_a_copy_is_complete_may_lock() -> None:
    with AsyncSaver("thread") as saver:

        def lock(_: object) -> None:
            with saver.lock():
                locked.set()

        for _ in range(3):
            locked = threading.Event()
            answer = saver.save({"w": torch.ones(4)}, storage_writer=MemoryWriter("a"), async_stager=DefaultStager())
            assert isinstance(answer, AsyncSaveResponse)
            answer.staging_completion.add_done_callback(lock)
            assert locked.wait(100)


class Never:
    """A stager that never finishes a copy."""

    should_synchronize_after_execute = False
    _synchronize_after_execute = False

    def __init__(self) -> None:
        self.copies: list[Future[dict[str, Any]]] = []

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        self.copies.append(Future())
        return self.copies[-1]

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("later", [False, True])
def test_waiting_for_lock_has_an_end(later: bool) -> None:
    saver = AsyncSaver("thread", options=SaverOptions(save_timeout_seconds=0.1))
    locked, over = threading.Event(), threading.Event()

    def hold() -> None:
        with saver.lock():
            locked.set()
            over.wait(100)

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait(100)
    stager = DefaultStager() if later else None
    with pytest.raises(SaverDeadlineError, match="the save to place could not begin"):
        saver.save({"w": torch.ones(4)}, checkpoint_id="place", async_stager=stager)
    over.set()
    holder.join(60)
    saver.close()


@pytest.mark.parametrize("cancelled", [False, True])
def test_waiting_for_a_stager_has_an_end(cancelled: bool) -> None:
    saver, stager = AsyncSaver("thread", options=SaverOptions(save_timeout_seconds=20.0 if cancelled else 0.1)), Never()
    answer = saver.save({"w": torch.ones(4)}, checkpoint_id="place", async_stager=stager)
    assert isinstance(answer, AsyncSaveResponse)
    if cancelled:
        stager.copies[0].cancel()
    error = answer.upload_completion.exception(timeout=250)
    assert isinstance(error, CancelledError if cancelled else SaverDeadlineError)
    saver.close()


@pytest.mark.parametrize("owner", ["function", "method"])
def test_a_path_without_its_name_is_told_it(owner: str) -> None:
    call: Any = async_save if owner == "function" else shared_saver("thread").save
    with pytest.raises(TypeError, match=r"save\(\): 'run/step-1' needs its name: pass checkpoint_id='run/step-1'"):
        call({"step": 1}, "run/step-1")

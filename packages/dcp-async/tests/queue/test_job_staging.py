"""Saves that are larger than the memory for copies: refused, or copied in waves while `save` waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dcp_async import (
    AsyncSaver,
    AsyncSaveResponse,
    DefaultStager,
    SaverDeadlineError,
    SaverOptions,
    StagingMismatchError,
)
from dcp_async.staging.waves import WaveSource
from dcp_base.hookspecs import CheckpointEvent, hookimpl
from dcp_core import DefaultSavePlanner, estimate, load, plugins, save
from dcp_core.errors import NotEnoughMemoryError, UnsupportedValueError
from integration_tests.kits.memory import MemoryReader, MemoryWriter
from integration_tests.kits.memory_store import OBJECTS

BUDGET = 2 << 20


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    GatedWriter.entered.clear()
    GatedWriter.gate.clear()
    yield
    OBJECTS.clear()


class GatedWriter(MemoryWriter):
    """Publishes, or writes, when the test allows it."""

    entered, gate = threading.Event(), threading.Event()

    def finish(self, metadata: Any, results: Any) -> None:
        self.entered.set()
        assert self.gate.wait(100)
        super().finish(metadata, results)


class HangingWriter(MemoryWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        GatedWriter.entered.set()
        assert GatedWriter.gate.wait(100)
        return super().write_data(plan, planner)


class WholeWriter(MemoryWriter):
    """Takes tensors as a whole, like a writer of another library."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            planner.resolve_data(item)
        return super().write_data(plan, planner)


class OwnPlanner(DefaultSavePlanner):
    """A planner of the caller's own."""


def _state(number: float = 0) -> dict[str, Any]:
    large = {f"layer.{n}": torch.arange(250_000.0) + n + number for n in range(6)}
    return {**large, "tied": large["layer.2"], "turned": torch.randn(300, 400).t() + number, "step": number}


def _saver(**options: Any) -> AsyncSaver:
    settings = {"max_staging_bytes": BUDGET, "staging": "waves", **options}
    return AsyncSaver("thread", options=SaverOptions(**settings))


def _loaded(folder: str, like: dict[str, Any]) -> dict[str, Any]:
    found = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1 for key, value in like.items()}
    load(found, storage_reader=MemoryReader(folder))
    return found


def _same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(two[key])) for key in two)


def test_the_values_are_those_of_one_moment_and_memory_is_bounded() -> None:
    with _saver() as saver:
        for number in range(3):
            state = _state(number)
            expected = {key: torch.as_tensor(value).clone() for key, value in state.items()}
            future: Any = saver.save(state, storage_writer=MemoryWriter("a"))
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(-7)
            assert future.result().aliases == {"tied": "layer.2"}
            assert _same(_loaded("a", state), expected)
        assert saver.staging_bytes == BUDGET


def test_the_same_index_as_a_synchronous_save() -> None:
    state = _state()
    plain = save(state, storage_writer=MemoryWriter("plain"))
    with _saver() as saver:
        waves: Any = saver.save(state, storage_writer=MemoryWriter("waves")).result()  # type: ignore[union-attr]
    assert waves.state_dict_metadata == plain.state_dict_metadata


def test_save_waits_only_for_what_does_not_fit() -> None:
    """The checkpoint is not published, and the rest lies in the memory for copies."""
    state = _state()
    with _saver() as saver:
        future = saver.save(state, storage_writer=GatedWriter("a"))
        state["layer.0"].zero_()
        assert not future.done()  # type: ignore[union-attr]
        GatedWriter.gate.set()
    assert _loaded("a", state)["layer.0"][5] == 5


@pytest.mark.parametrize("compression", ["zstd", "auto"])
def test_compressed(compression: str) -> None:
    pytest.importorskip("dcp_transforms")
    state = _state()
    with _saver() as saver:
        saver.save(state, storage_writer=MemoryWriter("a", compression=compression)).result()  # type: ignore[union-attr]
    assert _same(_loaded("a", state), state)


def test_what_fits_is_copied_as_ever() -> None:
    with _saver() as saver:
        state = {"w": torch.ones(1000)}
        saver.save(state, storage_writer=GatedWriter("a"))
        state["w"].zero_()
        GatedWriter.gate.set()
    assert _loaded("a", state)["w"].sum() == 1000


def test_an_asynchronous_stager_says_when_values_may_change() -> None:
    state = _state()
    with _saver() as saver:
        response = saver.save(state, storage_writer=GatedWriter("a"), async_stager=DefaultStager())
        assert isinstance(response, AsyncSaveResponse)
        response.staging_completion.result(100)
        with saver.lock():
            state["layer.0"].zero_()
        assert not response.upload_completion.done()
        GatedWriter.gate.set()
        response.upload_completion.result(100)
    assert _loaded("a", state)["layer.0"][5] == 5


def test_latest_waits_for_the_memory_of_the_earlier_save() -> None:
    with _saver() as saver:
        saver.save(_state(), storage_writer=GatedWriter("a"), overlap="latest")
        assert GatedWriter.entered.wait(100)
        threading.Timer(0.2, GatedWriter.gate.set).start()
        second = saver.save(_state(1), storage_writer=MemoryWriter("b"), overlap="latest")
        assert GatedWriter.gate.is_set()
        second.result(100)  # type: ignore[union-attr]
    assert _same(_loaded("b", _state(1)), {"step": 1})


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_storage_error_in_a_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    with _saver() as saver:
        saver.save(_state(), storage_writer=MemoryWriter("a")).result()  # type: ignore[union-attr]
        with monkeypatch.context() as patched:
            patched.setattr("integration_tests.kits.memory_store._MemorySink.write", _no_space)
            future: Any = saver.save(_state(1), storage_writer=MemoryWriter("a"))
            with pytest.raises(OSError, match="No space left"):
                future.result(100)
        assert _loaded("a", _state())["step"] == 0
        saver.save(_state(2), storage_writer=MemoryWriter("a")).result()  # type: ignore[union-attr]
    assert _same(_loaded("a", _state()), {"step": 2, "layer.3": _state(2)["layer.3"]})


@pytest.mark.parametrize("error", [KeyboardInterrupt("in a wave"), RuntimeError("CUDA error")])
def test_an_error_of_the_copy_in_a_wave_is_raised_by_save(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    real, calls = WaveSource._fill, iter(range(100))

    def fill(self: WaveSource, *arguments: int) -> None:
        if next(calls) == 5:
            raise error
        real(self, *arguments)

    with _saver() as saver:
        saver.save(_state(), storage_writer=MemoryWriter("a")).result()  # type: ignore[union-attr]
        with monkeypatch.context() as patched:
            patched.setattr(WaveSource, "_fill", fill)
            with pytest.raises(type(error), match=str(error)):
                saver.save(_state(1), storage_writer=MemoryWriter("a"))
            saver.wait(100)
        assert _loaded("a", _state())["step"] == 0
        saver.save(_state(2), storage_writer=MemoryWriter("a"))  # raises no error of the save before
    assert _loaded("a", _state())["step"] == 2


def test_a_change_in_a_wave_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    state, real = _state(), WaveSource._fill

    def fill(self: WaveSource, *arguments: int) -> None:
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.add_(1)
        real(self, *arguments)

    monkeypatch.setattr(WaveSource, "_fill", fill)
    with _saver() as saver, pytest.raises(StagingMismatchError, match="changed while it was copied"):
        saver.save(state, storage_writer=MemoryWriter("a"))
    assert "a" not in OBJECTS or not any(".metadata" in name for name in OBJECTS)


def test_storage_that_hangs_does_not_hold_training_for_ever() -> None:
    saver = _saver(save_timeout_seconds=0.5)
    with pytest.raises(SaverDeadlineError, match="max_staging_bytes"):
        saver.save(_state(), storage_writer=HangingWriter("a"))
    GatedWriter.gate.set()
    saver.close()


def test_close_in_another_thread_ends_a_wave() -> None:
    saver = _saver()

    def close() -> None:
        assert GatedWriter.entered.wait(100)
        GatedWriter.gate.set()
        saver.close(20)

    closing = threading.Thread(target=close)
    closing.start()
    future: Any = saver.save(_state(), storage_writer=HangingWriter("a"))
    closing.join(100)
    assert not closing.is_alive()
    future.result(100)
    assert _loaded("a", _state())["step"] == 0


def test_a_writer_that_takes_whole_tensors_gets_none() -> None:
    with _saver() as saver:
        future: Any = saver.save(_state(), storage_writer=WholeWriter("a"))
        with pytest.raises(UnsupportedValueError, match="this storage writer takes tensors as a whole"):
            future.result(100)


@pytest.mark.parametrize(
    ("options", "planner"),
    [({"staging": "refuse"}, None), ({}, OwnPlanner()), ({}, DefaultSavePlanner(compare_all=True))],
    ids=["refuse", "own planner", "compare all"],
)
def test_what_is_refused_names_waves(options: dict[str, Any], planner: Any) -> None:
    with _saver(**options) as saver, pytest.raises(NotEnoughMemoryError, match="staging='waves'"):
        saver.save(_state(), storage_writer=MemoryWriter("a"), planner=planner)


def test_a_default_planner_of_the_callers_own_is_as_before_afterwards() -> None:
    planner = DefaultSavePlanner()
    with _saver() as saver:
        saver.save(_state(), storage_writer=MemoryWriter("a"), planner=planner).result()  # type: ignore[union-attr]
    assert "feed" not in vars(planner)
    save(_state(3), storage_writer=MemoryWriter("a"), planner=planner)
    assert _same(_loaded("a", _state(3)), {"step": 3, "tied": _state(3)["tied"]})


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="needs max_staging_bytes"):
        SaverOptions(staging="waves")
    with pytest.raises(ValueError, match="choose 'refuse' or 'waves'"):
        SaverOptions(staging="wave")  # type: ignore[arg-type]


def test_without_waves_nothing_is_waited_for() -> None:
    with _saver(staging="refuse") as saver:
        found = estimate(_state(), saver)
    assert (found.waiting_seconds, found.ranks[0].waiting_bytes) == (0, 0)
    assert found.staging_bytes > BUDGET


@pytest.fixture
def record() -> Iterator[Callable[[], list[CheckpointEvent]]]:
    seen: list[CheckpointEvent] = []

    class Recorder:
        @hookimpl
        def dcp_on_event(self, event: CheckpointEvent) -> None:
            seen.append(event)

    plugins.register(Recorder(), name="recorder")
    yield lambda: seen
    OBJECTS.clear()
    plugins.unregister("recorder")


def test_predicted_and_reported(record: Callable[[], list[CheckpointEvent]]) -> None:
    state: dict[str, Any] = {f"layer.{n}": torch.arange(250_000.0) for n in range(6)}
    nbytes = 6 * 1_000_000
    with AsyncSaver("thread", options=SaverOptions(max_staging_bytes=BUDGET, staging="waves")) as saver:
        saver.warm_up(state_dict=state, no_dist=True)
        found = estimate(state, saver)
        saver.save(state, storage_writer=MemoryWriter("a")).result()  # type: ignore[union-attr]
    assert found.staging_bytes == BUDGET
    assert found.ranks[0].waiting_bytes == pytest.approx(nbytes - BUDGET, abs=1000)
    assert found.ranks[0].waiting_seconds is None or found.ranks[0].waiting_seconds > 0
    assert "training waits until 3.72 MiB are written" in repr(found)
    (staged,) = [event for event in record() if event.phase == "stage"]
    assert (staged.operation, staged.state, staged.memory_bytes) == ("save", "finished", BUDGET)
    assert staged.bytes == pytest.approx(nbytes, abs=1000)
    assert 0 <= (staged.own_seconds or -1) < (staged.seconds or 0)


def test_a_saver_without_a_limit_reports_no_copy(record: Callable[[], list[CheckpointEvent]]) -> None:
    with AsyncSaver("thread") as saver:
        saver.save({"a": torch.ones(3)}, storage_writer=MemoryWriter("a"), no_dist=True).result()  # type: ignore[union-attr]
    phases = [event.phase for event in record()]
    assert "write" in phases
    assert "stage" not in phases

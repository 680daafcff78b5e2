from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dcp_base import CheckpointEvent, PluginRegistry, hookimpl
from dcp_base import progress as module
from dcp_base.progress import count_progress, find_progress, report_operation


class Observer:
    def __init__(self) -> None:
        self.events: list[CheckpointEvent] = []

    @hookimpl
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        self.events.append(event)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> PluginRegistry:
    """A registry without plug-ins, and no pause between two events."""
    registry = PluginRegistry("dcp-no-such-plugins")
    monkeypatch.setattr(module, "installed", registry)
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 0)
    return registry


@pytest.fixture
def observer(registry: PluginRegistry) -> Iterator[Observer]:
    observer = Observer()
    registry.register(observer, name="observer")
    yield observer
    registry.unregister("observer")


BEGUN = CheckpointEvent("save", "write", "started", 3, "step-1", world_size=4, operation_id="x", time=1.0)


def test_bytes_are_counted_for_the_phase_of_this_context(observer: Observer) -> None:
    with count_progress(BEGUN):
        progress = find_progress()
        progress.expect(100)
        progress.expect(20)
        progress(30)
        thread = threading.Thread(target=progress, args=(40,))
        thread.start()
        thread.join()
    find_progress()(50)  # of no phase
    assert [(event.bytes, event.expected_bytes) for event in observer.events] == [(30, 120), (70, 120)]
    for event in observer.events:
        assert (event.state, event.phase, event.rank, event.operation_id) == ("progress", "write", 3, "x")
        assert event.time is not None
        assert event.time > 1


def test_more_than_expected_is_expected_then(observer: Observer) -> None:
    with count_progress(BEGUN):
        find_progress()(30)
    assert observer.events[0].expected_bytes == 30


def test_a_short_phase_reports_nothing(observer: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 600)
    with count_progress(BEGUN):
        for _ in range(1000):
            find_progress()(1)
    assert observer.events == []


def test_events_have_pauses_between_them(observer: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 0.25)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    with count_progress(BEGUN):
        for _ in range(1024):
            now[0] += 1 / 1024
            find_progress()(1)
    assert [event.time for event in observer.events] == [0.25, 0.5, 0.75, 1.0]


def test_nothing_is_counted_where_nobody_observes(registry: PluginRegistry) -> None:
    with count_progress(BEGUN):
        assert not find_progress().wanted
        find_progress()(1)
    with report_operation("verify", "step-1") as progress:
        assert not progress.wanted
    registry.divert_events(lambda _: None)
    with count_progress(BEGUN):
        assert find_progress().wanted


def test_an_observer_in_the_middle_holds_up_no_other_thread(registry: PluginRegistry) -> None:
    entered, leave, heard = threading.Event(), threading.Event(), []

    class Slow:
        @hookimpl
        def dcp_on_event(self, event: CheckpointEvent) -> None:
            heard.append(event.bytes)
            entered.set()
            leave.wait(60)

    registry.register(Slow(), name="slow")
    with count_progress(BEGUN):
        progress = find_progress()
        thread = threading.Thread(target=progress, args=(1,))
        thread.start()
        assert entered.wait(60)
        progress(2)  # does not wait
        leave.set()
        thread.join()
        progress(4)
    assert heard == [1, 7]


def test_an_operation_is_reported_from_start_to_end(observer: Observer) -> None:
    with report_operation("verify", "step-1") as progress:
        progress(5)
    with pytest.raises(KeyError), report_operation("convert", "b"):
        raise KeyError("x")
    assert [(event.operation, event.state, event.checkpoint_id) for event in observer.events] == [
        ("verify", "started", "step-1"),
        ("verify", "progress", "step-1"),
        ("verify", "finished", "step-1"),
        ("convert", "started", "b"),
        ("convert", "failed", "b"),
    ]
    assert observer.events[-1].error == "KeyError: 'x'"
    assert len({event.operation_id for event in observer.events}) == 2

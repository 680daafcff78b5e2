"""What observers and estimates say of a copy in waves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dcp_async import AsyncSaver, SaverOptions
from dcp_core import estimate, plugins
from dcp_core.hookspecs import CheckpointEvent, hookimpl
from dcp_core.testing.memory import MemoryWriter
from dcp_core.testing.memory_store import OBJECTS

BUDGET = 2 << 20


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

"""Events of one operation, as the core emits them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dcp_telemetry
from dcp_base import CheckpointEvent

Events = Callable[..., list[CheckpointEvent]]


@pytest.fixture(autouse=True)
def nothing_enabled() -> Iterator[None]:
    """Each test begins and ends without an exporter."""
    dcp_telemetry.disable()
    yield
    dcp_telemetry.disable()


@pytest.fixture
def events() -> Events:
    """The events of a save on one rank; `error` makes its write fail."""

    def make(name: str = "step-7", *, rank: int = 0, at: float = 1000.0, error: str | None = None) -> list[Any]:
        def event(phase: str, state: str, time: float, **facts: Any) -> CheckpointEvent:
            facts |= {"world_size": 4, "operation_id": f"{name}/{rank}", "time": at + time}
            return CheckpointEvent("save", phase, state, rank, name, **facts)

        own: dict[str, Any] = {"own_seconds": 0.25, "slowest_rank": 3, "slowest_seconds": 0.5}
        end: dict[str, Any] = {"error": error} if error else {"bytes": 640, **own}
        state = "failed" if error else "finished"
        return [
            event("total", "started", 0.0),
            event("plan", "started", 0.0),
            event("plan", "finished", 0.5, seconds=0.5, **own),
            event("write", "started", 0.5),
            event("write", state, 2.0, seconds=1.5, **end),
            event("total", state, 2.0, seconds=2.0, **end),
        ]

    return make

"""Races between streams, searched on the pretend device by random schedules; each guard is needed for one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dcp_async.staging import stagers
from dcp_core import loading, saving
from dcp_core.tensors.devices import CopyStream
from integration_tests.devices.schedules import search

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def on_pretend(device: str) -> None:
    if device != "pretend":
        pytest.skip("only the pretend device runs work as late as it may")


def test_no_value_is_wrong() -> None:
    assert search(range(60)) is None


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_value_is_wrong_in_ten_thousand_schedules() -> None:
    assert search(range(1000, 11_000)) is None


def nothing(*_: Any) -> None:
    """Take the place of a guard."""


def unchanged(function: Callable[[], Any]) -> Callable[[], Any]:
    return function


GUARDS: dict[str, tuple[Any, str, Any]] = {
    "copies wait for what computes": (CopyStream, "follow", nothing),
    "the host waits for copies": (CopyStream, "synchronize", nothing),
    "reused buffers wait for their last copy": (CopyStream, "record", nothing),
    "a copying thread takes over the streams": (stagers, "on_this_stream", unchanged),
    "a save waits for what computes": (saving, "finish_computing", nothing),
    "a load waits for what computes": (loading, "finish_computing", nothing),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_is_needed(monkeypatch: pytest.MonkeyPatch, guard: str) -> None:
    monkeypatch.setattr(*GUARDS[guard])
    assert search(range(1000)) is not None

"""Races between streams, searched on the pretend device by random schedules; each guard is needed for one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dcp_async.staging import stagers
from dcp_async.staging.arenas import Arena
from dcp_core import loading, saving
from dcp_core.tensors.devices import CopyStream
from integration_tests.devices import pretend
from integration_tests.devices.schedules import search

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def on_pretend(device: str) -> None:
    if device != "pretend":
        pytest.skip("only the pretend device runs work as late as it may")


def test_no_value_is_wrong() -> None:
    assert search(range(200)) is None


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_value_is_wrong_in_ten_thousand_schedules() -> None:
    assert search(range(1000, 11_000)) is None


def nothing(*_: Any) -> None:
    """Take the place of a guard."""


def unchanged(function: Callable[[], Any]) -> Callable[[], Any]:
    return function


def follow_the_default_stream(self: Any) -> None:
    self._stream.wait_event(self._module.default_stream(self._device).record_event())


def wait_for_the_default_stream(self: Any) -> None:
    self._module.default_stream(self._device).synchronize()


def finish_the_default_stream(*_: Any) -> None:
    torch.get_device_module(pretend.NAME).default_stream().synchronize()


GUARDS: dict[str, tuple[Any, str, Any]] = {
    "copies wait for what computes": (CopyStream, "follow", nothing),
    "copies wait for the stream that computes": (CopyStream, "follow", follow_the_default_stream),
    "the host waits for copies": (CopyStream, "synchronize", nothing),
    "the host waits for the stream of copies": (CopyStream, "synchronize", wait_for_the_default_stream),
    "reused buffers wait for their last copy": (CopyStream, "record", nothing),
    "memory that a failed load writes to is kept": (CopyStream, "keep", nothing),
    "staged values keep their memory": (Arena, "in_use", lambda _: False),
    "a copying thread takes over the streams": (stagers, "on_this_stream", unchanged),
    "a save waits for what computes": (saving, "finish_computing", nothing),
    "a save waits for the stream that computes": (saving, "finish_computing", finish_the_default_stream),
    "a load waits for what computes": (loading, "finish_computing", nothing),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_is_needed(monkeypatch: pytest.MonkeyPatch, guard: str) -> None:
    monkeypatch.setattr(*GUARDS[guard])
    assert search(range(1000)) is not None

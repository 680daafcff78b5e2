"""Attempts are limited in number and time, and their failures are reported."""

from __future__ import annotations

import logging
import time

import pytest

from dcp_io import StorageError
from dcp_io.stores.stream_files import Attempts


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses in seconds, which are recorded instead of waited for."""
    taken: list[float] = []
    monkeypatch.setattr(time, "sleep", taken.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(taken))
    return taken


def test_the_limit_holds_and_pauses_grow(pauses: list[float]) -> None:
    made = Attempts("GET x", 12)
    while made.wait("no answer"):
        assert made.number == len(pauses) + 1
    assert made.number == 12
    assert len(pauses) == 11
    assert all(0.3 * 0.2 * 2**n <= pause <= 0.2 * 2**n for n, pause in enumerate(pauses[:4]))
    assert max(pauses) <= 5


def test_the_deadline_holds(pauses: list[float]) -> None:
    made = Attempts("GET x", 100, retry_timeout_seconds=3)
    while made.wait("no answer"):
        pass
    assert 1 < made.number < 100
    assert sum(pauses) <= 3


def test_a_single_attempt_is_not_waited_for(pauses: list[float]) -> None:
    assert not Attempts("PUT x", 1).wait("no answer")
    assert pauses == []


def test_messages(pauses: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    made = Attempts("GET s3://b/x", 2)
    made.wait("503")
    assert "GET s3://b/x failed (attempt 1 of 2), trying again: 503" in caplog.text
    error = made.failure("503", "check the service")
    assert isinstance(error, StorageError)
    seconds = f"{pauses[0]:.1f}"
    assert str(error) == f"GET s3://b/x: failed after 2 attempts in {seconds} s: 503; check the service"
    assert "after 1 attempt in" in str(Attempts("GET x", 1).failure("503", "wait"))

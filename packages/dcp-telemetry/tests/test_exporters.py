"""Exporters are called only when enabled, apart from each other, and never raise into a save."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import Any

import pytest

import dcp_telemetry
from dcp_base import CheckpointEvent, installed
from dcp_telemetry.event_fields import error_type
from dcp_telemetry.exporters import Exporters, exporters

NOT_ENABLED = """
import sys
from dcp_base import CheckpointEvent, installed
{enabling}
installed.emit(CheckpointEvent("save", "total", "started", 0))
print(sorted({{"dcp_telemetry", "opentelemetry", "prometheus_client", "torch", "numpy"}} & sys.modules.keys()))
print("dcp-telemetry" in [plugin.name for plugin in installed.list()])
"""


class Keeper:
    def __init__(self, error: Exception | None = None) -> None:
        self.events: list[CheckpointEvent] = []
        self.closed = 0
        self.error = error

    def observe(self, event: CheckpointEvent) -> None:
        self.events.append(event)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("enabling", ["", "import dcp_telemetry; dcp_telemetry.disable()"])
def test_installed_is_not_enabled_and_imports_neither_library(enabling: str) -> None:
    code = NOT_ENABLED.format(enabling=enabling)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[:2] == [str(["dcp_telemetry"] if enabling else []), "False"]


def test_the_first_exporter_subscribes_and_the_last_one_unsubscribes() -> None:
    exporters = Exporters()
    for name in ("a", "b"):
        exporters.enable(name, Keeper())
        assert [plugin.name for plugin in installed.list()].count("dcp-telemetry") == 1
    exporters.disable("a")
    assert installed.observed
    exporters.disable("b")
    exporters.disable("b")
    assert "dcp-telemetry" not in [plugin.name for plugin in installed.list()]


def test_an_exporter_that_fails_is_logged_and_stops_no_other(events: Any, caplog: pytest.LogCaptureFixture) -> None:
    exporters, broken, well = Exporters(), Keeper(ZeroDivisionError("of mine")), Keeper()
    exporters.enable("broken", broken)
    exporters.enable("well", well)
    for event in events():
        exporters.dcp_on_event(event)
    exporters.disable("broken", "well")
    assert len(broken.events) == len(well.events) == 6
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert "'broken'" in caplog.records[0].getMessage()
    assert "of mine" in str(caplog.records[0].exc_info)


def test_disabled_exporters_are_closed_once_and_hear_nothing_more(events: Any) -> None:
    exporters, keeper = Exporters(), Keeper()
    exporters.enable("keeper", keeper)
    exporters.disable("keeper", "unknown")
    exporters.disable("keeper")
    exporters.dcp_on_event(events()[0])
    assert keeper.closed == 1
    assert keeper.events == []


def test_exporters_come_and_go_while_events_arrive(events: Any) -> None:
    exporters, failed, stop = Exporters(), [], threading.Event()

    def emit() -> None:
        try:
            while not stop.is_set():
                for event in events():
                    exporters.dcp_on_event(event)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=emit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(300):
        exporters.enable(f"{number % 7}", Keeper())
        exporters.disable(f"{(number + 3) % 7}")
    stop.set()
    for thread in threads:
        thread.join()
    exporters.disable(*map(str, range(7)))
    assert failed == []


@pytest.mark.parametrize(
    ("library", "enable"),
    [
        ("opentelemetry", dcp_telemetry.enable_opentelemetry),
        ("prometheus_client", dcp_telemetry.enable_prometheus),
    ],
)
def test_a_missing_library_is_named_with_its_extra(library: str, enable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("dcp_telemetry.") and each.endswith("_exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r"pip install (opentelemetry-api|prometheus-client), .* extra"):
        enable()


@pytest.mark.parametrize(
    ("text", "kind"),
    [("OSError: [Errno 28] full", "OSError"), ("a.b.Error: x", "a.b.Error"), ("it broke", "_OTHER"), (None, "_OTHER")],
)
def test_types_of_errors_are_few(text: str | None, kind: str) -> None:
    assert error_type(CheckpointEvent("save", "total", "failed", 0, error=text)) == kind


def test_events_reach_exporters_while_they_are_enabled(events: Any) -> None:
    keeper = Keeper()
    exporters.enable("keeper", keeper)
    installed.emit(events()[0])
    exporters.disable("keeper")
    installed.emit(events()[1])
    assert keeper.events == [events()[0]]

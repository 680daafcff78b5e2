"""Registry of this process's enabled telemetry exporters, and the histogram buckets and error names that they share."""

from __future__ import annotations

import re
import threading
from typing import Protocol

from dcp_hooks import CheckpointEvent
from dcp_hooks.logs import logger

__all__ = ["BUCKETS_SECONDS", "TOTAL", "Exporter", "Exporters", "error_type", "exporters", "is_waiting"]

TOTAL = "total"
"""Phase name of the events that describe a whole save or load instead of one of its phases."""
BUCKETS_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper bounds of the duration histograms' buckets, in seconds: small saves take milliseconds, large ones an hour."""


class Exporter(Protocol):
    """Contract of a telemetry exporter. Several threads may call its methods at the same time."""

    def observe(self, event: CheckpointEvent) -> None:
        """Export one event of a save or load as spans or metrics."""

    def close(self) -> None:
        """Unregister the metrics and end the open spans.

        `observe` may still be called after `close`, by threads that were already passing on an event.
        """


class Exporters:
    """Registry of enabled exporters by name. Thread-safe; `observe` takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._enabled: dict[str, Exporter] = {}

    def enable(self, name: str, exporter: Exporter) -> None:
        """Add an exporter under a name. `disable` an exporter of the same name first."""
        with self._lock:
            self._enabled = {**self._enabled, name: exporter}

    def disable(self, *names: str) -> None:
        """Remove and close the exporters with these names; names that are not enabled are ignored."""
        with self._lock:
            before = self._enabled
            self._enabled = {name: exporter for name, exporter in before.items() if name not in names}
        for name in {*names} & before.keys():
            before[name].close()

    def observe(self, event: CheckpointEvent) -> None:
        """Pass an event, unless its state is `progress`, to every enabled exporter; errors are logged, not raised."""
        if event.state == "progress":  # for bars: spans and metrics are of what has ended
            return
        for name, exporter in self._enabled.items():
            try:
                exporter.observe(event)
            except Exception:  # noqa: BLE001 - a save never fails because of its telemetry
                logger.warning("the exporter %r of dcp_telemetry failed", name, exc_info=True)


def error_type(event: CheckpointEvent) -> str:
    """Return the class name of an event's error, for the attribute `error.type`.

    Returns `_OTHER`, as OpenTelemetry's conventions require, if the error's text does not begin with a class name.
    """
    found = re.match(r"[A-Za-z_][\w.]*(?=:)", event.error or "")
    return found[0] if found else "_OTHER"


def is_waiting(event: CheckpointEvent) -> bool:
    """Whether an event is of no operation, but says how many bytes wait for their promotion to a tier."""
    return (event.operation, event.phase) == ("promote", "waiting")


exporters = Exporters()
"""The enabled exporters of this process."""

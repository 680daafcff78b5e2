"""The enabled exporters of this process; the histogram buckets and the types of errors that all exporters use."""

from __future__ import annotations

import re
import threading
from typing import Protocol

from dcp_hooks import CheckpointEvent
from dcp_hooks.logs import logger

__all__ = ["BUCKETS_SECONDS", "TOTAL", "Exporter", "Exporters", "error_type", "exporters"]

TOTAL = "total"
"""The phase that stands for a whole operation."""
BUCKETS_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper bounds of the histograms of durations: small saves take milliseconds, large ones to slow disks an hour."""


class Exporter(Protocol):
    """Contract of an exporter; several threads may call it at a time."""

    def observe(self, event: CheckpointEvent) -> None:
        """Export an event."""

    def close(self) -> None:
        """Release what is registered elsewhere; afterwards only events that are being passed on may still come."""


class Exporters:
    """Exporters by name. Thread-safe: events are passed on without a lock, even while an exporter is being enabled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._enabled: dict[str, Exporter] = {}

    def enable(self, name: str, exporter: Exporter) -> None:
        """Add an exporter under a name that no enabled exporter has; see `disable`."""
        with self._lock:
            self._enabled = {**self._enabled, name: exporter}

    def disable(self, *names: str) -> None:
        """Remove and close the exporters of these names, as far as they are enabled."""
        with self._lock:
            before = self._enabled
            self._enabled = {name: exporter for name, exporter in before.items() if name not in names}
        for name in {*names} & before.keys():
            before[name].close()

    def observe(self, event: CheckpointEvent) -> None:
        """Pass an event on to every exporter. An exporter's error is logged; others and the save continue."""
        for name, exporter in self._enabled.items():
            try:
                exporter.observe(event)
            except Exception:  # noqa: BLE001 - a save never fails because of its telemetry
                logger.warning("the exporter %r of dcp_telemetry failed", name, exc_info=True)


def error_type(event: CheckpointEvent) -> str:
    """Return the class of an event's error if its text begins with one; else `_OTHER`, OpenTelemetry's convention."""
    found = re.match(r"[A-Za-z_][\w.]*(?=:)", event.error or "")
    return found[0] if found else "_OTHER"


exporters = Exporters()
"""The exporters of this process."""

"""Fields of events for both exporters."""

from __future__ import annotations

import re

from dcp_base import CheckpointEvent

TOTAL = "total"
"""Phase of a whole save or load."""
BUCKETS_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper bounds: small saves take milliseconds, large ones an hour."""


def error_type(event: CheckpointEvent) -> str:
    """Return an error's class name, or OpenTelemetry's `_OTHER`."""
    found = re.match(r"[A-Za-z_][\w.]*(?=:)", event.error or "")
    return found[0] if found else "_OTHER"


def is_waiting(event: CheckpointEvent) -> bool:
    """Return whether an event reports bytes that wait for promotion."""
    return (event.operation, event.phase) == ("promote", "waiting")

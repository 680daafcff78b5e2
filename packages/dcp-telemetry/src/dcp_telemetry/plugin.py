"""Observer, found by entry point, that passes events on to the enabled exporters. Imports nothing heavy."""

from dcp_hooks import CheckpointEvent, hookimpl
from dcp_telemetry.exporters import exporters

__all__ = ["dcp_on_event"]


@hookimpl
def dcp_on_event(event: CheckpointEvent) -> None:
    """Pass an event on to every enabled exporter; costs one call where there is none."""
    exporters.observe(event)

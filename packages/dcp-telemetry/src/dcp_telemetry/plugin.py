"""Plug-in whose observer passes the events of saves and loads to the enabled exporters. Imports nothing heavy."""

from dcp_hooks import CheckpointEvent, hookimpl
from dcp_telemetry.exporters import exporters

__all__ = ["dcp_on_event"]


@hookimpl
def dcp_on_event(event: CheckpointEvent) -> None:
    """Pass an event of a save or load to every enabled exporter."""
    exporters.observe(event)

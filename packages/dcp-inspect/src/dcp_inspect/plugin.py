"""Observer, found by entry point, that shows the progress of long operations. Imports nothing heavy."""

from dcp_hooks import CheckpointEvent, hookimpl
from dcp_inspect.visuals.progress_bar import observe

__all__ = ["dcp_on_event"]


@hookimpl
def dcp_on_event(event: CheckpointEvent) -> None:
    """Draw the progress bar of a long operation, where somebody looks."""
    observe(event)

"""What can go wrong with keeping checkpoints, beside what goes wrong with saving and loading them."""

from __future__ import annotations

from dcp_core import DcpError

__all__ = ["StepWentBackError", "UnfinishedSaveError"]


class UnfinishedSaveError(DcpError, TimeoutError):
    """A save in the background takes longer than it was waited for; it goes on."""


class StepWentBackError(DcpError, ValueError):
    """A step is to be saved that is lower than one with a good checkpoint; nothing was written."""

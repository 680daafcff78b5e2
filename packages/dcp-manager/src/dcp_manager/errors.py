"""Errors of the checkpoint manager, in addition to errors of saving and loading."""

from __future__ import annotations

from dcp_core import DcpError

__all__ = ["StepWentBackError", "UnfinishedSaveError"]


class UnfinishedSaveError(DcpError, TimeoutError):
    """A save in the background takes longer than the manager waits; the save still runs."""


class StepWentBackError(DcpError, ValueError):
    """The step to save is lower than the step of an undamaged checkpoint; nothing was written."""

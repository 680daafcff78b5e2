"""Errors of the manager, in addition to those of saving and loading."""

from __future__ import annotations

from dcp_core import DcpError

__all__ = ["StepWentBackError", "UnfinishedSaveError"]


class UnfinishedSaveError(DcpError, TimeoutError):
    """A save in the background exceeded the time that the manager waits; it still runs."""


class StepWentBackError(DcpError, ValueError):
    """The step to save is lower than one with a good checkpoint; nothing was written."""

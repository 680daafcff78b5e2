"""What can go wrong with keeping checkpoints, beside what goes wrong with saving and loading them."""

from __future__ import annotations

from dcp_core import DcpError

__all__ = ["UnfinishedSaveError"]


class UnfinishedSaveError(DcpError, TimeoutError):
    """A save in the background takes longer than it was waited for; it goes on."""

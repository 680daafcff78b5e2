"""The classes of errors that coordinators of ranks raise within saves and loads: those of `dcp_core.errors`."""

from __future__ import annotations

from typing import Final

from dcp_core.errors import (
    CheckpointException,
    CoordinatorLostError,
    CoordinatorTimeoutError,
    OperationError,
    PeerLostError,
    RankDisagreementError,
)
from dcp_core.ranks.errors import ErrorTypes

__all__ = ["RANK_ERRORS"]

RANK_ERRORS: Final = ErrorTypes(
    phase_failed=CheckpointException,
    peer_lost=PeerLostError,
    coordinator_timeout=CoordinatorTimeoutError,
    coordinator_lost=CoordinatorLostError,
    rank_disagreement=RankDisagreementError,
    operation=OperationError,
)
"""For every coordinator that a package over this one makes: then `except DcpError` catches what it raises."""

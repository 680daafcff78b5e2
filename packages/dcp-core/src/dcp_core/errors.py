"""Every exception of `dcp_core`, those of the packages below it, and the record of those that ranks raise together.

Each derives from `DcpError` and from the fitting built-in, so that callers can catch either. Messages name what is
known of key, file and rank, and say what to do.
"""

from __future__ import annotations

from typing import Final

import dcp_ranks
from dcp_hooks import errors as hooks_errors
from dcp_manifest.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpError,
    InvalidPlaceError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)
from dcp_manifest.printable import printable

__all__ = [
    "RANK_ERRORS",
    "CheckpointException",
    "CheckpointNotFoundError",
    "CoordinatorLostError",
    "CoordinatorTimeoutError",
    "CorruptCheckpointError",
    "DcpError",
    "DuplicateKeyError",
    "DuplicatePluginError",
    "InvalidPlaceError",
    "MissingKeyError",
    "NoCheckpointIdError",
    "NotEnoughMemoryError",
    "OperationError",
    "PeerLostError",
    "PlanError",
    "PluginLoadError",
    "PluginNotFoundError",
    "RankDisagreementError",
    "ShardNotFoundError",
    "UnloadableObjectError",
    "UnsafeCheckpointError",
    "UnsupportedFormatError",
    "UnsupportedValueError",
]


class CheckpointException(DcpError, dcp_ranks.PhaseFailedError):  # noqa: N818 - stock's name
    """A phase of a save or load failed on at least one rank; the same facts are raised on every rank.

    Also a RuntimeError, which stock raises where a call of ours fails within a phase, as that no storage takes an id.

    Args:
        msg: What failed, in words; begins `str(error)`.
        failures: Rank → (its exception, or None where it could not travel between processes; traceback as text).

    Source: torch 2.13 `torch.distributed.checkpoint.api.CheckpointException`, there a BaseException.
    """


class CoordinatorLostError(DcpError, dcp_ranks.CoordinatorLostError):
    """The store or group over which ranks coordinate is gone."""


class CoordinatorTimeoutError(DcpError, dcp_ranks.CoordinatorTimeoutError):
    """Ranks that others waited for did not arrive at a phase within the deadline.

    Args:
        phase: What the ranks were doing together.
        ranks: The ranks that were waited for, ranks of the group.
        waited_seconds: How long the rank that gave up had waited.
    """


class PeerLostError(DcpError, dcp_ranks.PeerLostError):
    """Ranks that others waited for are gone: their process has ended, or their host does not answer.

    Args:
        phase: What the ranks were doing together.
        ranks: The ranks that are gone, ranks of the group.
        how: What is known of each, in words, in the same order.
    """


class RankDisagreementError(DcpError, dcp_ranks.RankDisagreementError):
    """Ranks that should do the same thing do different ones; the message says which rank does what."""


class OperationError(DcpError, dcp_ranks.OperationError):
    """A save or load cannot go on: it has ended, or the other ranks have given up on this one."""


RANK_ERRORS: Final = dcp_ranks.ErrorTypes(
    phase_failed=CheckpointException,
    peer_lost=PeerLostError,
    coordinator_timeout=CoordinatorTimeoutError,
    coordinator_lost=CoordinatorLostError,
    rank_disagreement=RankDisagreementError,
    operation=OperationError,
)
"""For every coordinator that a package over this one makes: then `except DcpError` catches what it raises."""


class MissingKeyError(DcpError, KeyError):
    """A name that was asked for is not in the checkpoint."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message.
        return printable(str(self.args[0]), keep="\n\t") if self.args else ""


class NotEnoughMemoryError(DcpError, MemoryError):
    """A value that is to be loaded whole is larger than what can be allocated."""


class DuplicateKeyError(DcpError, ValueError):
    """Two values of a state dict would be saved under one name."""


class PlanError(DcpError, ValueError):
    """The plans of the ranks do not describe a checkpoint: chunks leave holes, overlap or disagree."""


class ShardNotFoundError(DcpError, LookupError, ValueError):
    """A value of this rank holds no shard at the offset that an item names."""


class UnsupportedValueError(DcpError, TypeError, ValueError):
    """A value of this kind cannot be saved or loaded as it is."""


class UnloadableObjectError(DcpError, TypeError):
    """An object would be saved in a form that a later load refuses to run."""


class PluginNotFoundError(DcpError, hooks_errors.PluginNotFoundError):
    """No installed plugin offers what is needed; the message names the package to install.

    Also a RuntimeError, which stock raises for a checkpoint id that none of its storages takes.
    """


class NoCheckpointIdError(DcpError, ValueError, RuntimeError):
    """Neither a checkpoint id nor a storage was passed: there is nowhere to save to or load from.

    Also a RuntimeError, which stock raises.
    """


class DuplicatePluginError(DcpError, hooks_errors.DuplicatePluginError):
    """Two distributions offer a plugin under one name."""


class PluginLoadError(DcpError, hooks_errors.PluginLoadError):
    """A plugin that is needed is installed, but cannot be imported or is not valid."""

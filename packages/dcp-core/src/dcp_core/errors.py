"""Every exception of `dcp_core`, and those of the packages below it, re-exported.

Each derives from `DcpError` and from the fitting built-in, so that callers can catch either. Messages name what is
known of key, file and rank, and say what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


class CheckpointException(DcpError, RuntimeError):  # noqa: N818 - stock's name
    """A phase of a save or load failed on at least one rank; the same facts are raised on every rank.

    Also a RuntimeError, which stock raises where a call of ours fails within a phase, as that no storage takes an id.

    Args:
        msg: What failed, in words; begins `str(error)`.
        failures: Rank → (its exception, or None where it could not travel between processes; traceback as text).

    Source: torch 2.13 `torch.distributed.checkpoint.api.CheckpointException`, there a BaseException.
    """

    def __init__(self, msg: str, failures: Mapping[int, tuple[BaseException | None, str]]) -> None:
        self._message = msg
        self._failures = dict(sorted(failures.items()))
        texts = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, (_, text) in self._failures.items()]
        ranks = ", ".join(map(str, self._failures))
        where = f" (failed on rank{'s' if len(self._failures) > 1 else ''} {ranks})" if self._failures else ""
        super().__init__("\n".join([f"{msg}{where}", *texts]))

    @property
    def failures(self) -> dict[int, tuple[BaseException | None, str]]:
        """Rank → (exception or None, traceback as text), in the order of ranks."""
        return self._failures

    def __reduce__(self) -> tuple[type[CheckpointException], tuple[str, dict[int, tuple[BaseException | None, str]]]]:
        return type(self), (self._message, self._failures)


class CoordinatorLostError(DcpError, ConnectionError):
    """The store or group over which ranks coordinate is gone."""


class CoordinatorTimeoutError(DcpError, TimeoutError):
    """Ranks that others waited for did not arrive at a phase within the deadline.

    Args:
        phase: What the ranks were doing together.
        ranks: The ranks that were waited for, ranks of the group.
        waited_seconds: How long the rank that gave up had waited.
    """

    def __init__(self, phase: str, ranks: Sequence[int], waited_seconds: float) -> None:
        self.phase = phase
        self.ranks = tuple(ranks)
        self.waited_seconds = waited_seconds
        names = ", ".join(map(str, self.ranks))
        super().__init__(
            f"phase {phase!r}: waited {waited_seconds:.1f} s for rank{'s' if len(self.ranks) > 1 else ''} {names}; see "
            "what held them up there, or allow more time with timeout_seconds"
        )

    def __reduce__(self) -> tuple[type[CoordinatorTimeoutError], tuple[str, tuple[int, ...], float]]:
        return type(self), (self.phase, self.ranks, self.waited_seconds)


class PeerLostError(DcpError, ConnectionError):
    """Ranks that others waited for are gone: their process has ended, or their host does not answer.

    Args:
        phase: What the ranks were doing together.
        ranks: The ranks that are gone, ranks of the group.
        how: What is known of each, in words, in the same order.
    """

    def __init__(self, phase: str, ranks: Sequence[int], how: Sequence[str]) -> None:
        self.phase = phase
        self.ranks = tuple(ranks)
        self.how = tuple(how)
        gone = "; ".join(f"rank {rank} is gone ({why})" for rank, why in zip(self.ranks, self.how, strict=True))
        super().__init__(
            f"phase {phase!r}: {gone}; no rank waits any longer. Look for the cause in that rank's own output and in "
            "its machine's log (out of memory?), and restart the job"
        )

    def __reduce__(self) -> tuple[type[PeerLostError], tuple[str, tuple[int, ...], tuple[str, ...]]]:
        return type(self), (self.phase, self.ranks, self.how)


class RankDisagreementError(DcpError, ValueError):
    """Ranks that should do the same thing do different ones; the message says which rank does what."""


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

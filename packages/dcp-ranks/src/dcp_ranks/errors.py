"""Errors of the agreement of ranks, and the record of error classes that a coordinator raises.

```
RanksError
├─ PhaseFailedError (RuntimeError)          a rank's part of a phase raised: which rank, with its traceback
├─ PeerLostError (ConnectionError)          a rank is gone: its process has ended, or its host does not answer
├─ CoordinatorTimeoutError (TimeoutError)   a rank did not arrive within the deadline
├─ CoordinatorLostError (ConnectionError)   the store or group over which ranks coordinate is gone
├─ RankDisagreementError (ValueError)       the ranks do different things
└─ OperationError (RuntimeError)            the operation cannot go on: it has ended, or was used in a wrong way
```

Each class also derives from the built-in exception in brackets, so that callers can catch either. Messages name the
phase and the ranks, and say what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "ERROR_TYPES",
    "CoordinatorLostError",
    "CoordinatorTimeoutError",
    "ErrorTypes",
    "OperationError",
    "PeerLostError",
    "PhaseFailedError",
    "RankDisagreementError",
    "RanksError",
]


class RanksError(Exception):
    """Base class of all errors that this package raises on purpose."""


class PhaseFailedError(RanksError, RuntimeError):
    """A phase failed on at least one rank; every rank raises this error, with the same facts.

    Args:
        msg: Description of the failure, with which `str(error)` begins.
        failures: Rank → (exception of that rank, or None if it could not be sent between processes; traceback as text).
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

    def __reduce__(self) -> tuple[type[Any], tuple[str, dict[int, tuple[BaseException | None, str]]]]:
        return type(self), (self._message, self._failures)


class CoordinatorLostError(RanksError, ConnectionError):
    """The store or group over which ranks coordinate is gone."""


class CoordinatorTimeoutError(RanksError, TimeoutError):
    """Ranks that others waited for did not arrive at a phase within the deadline.

    Args:
        phase: Name of the phase that the ranks were in.
        ranks: Ranks (within the process group) that were waited for.
        waited_seconds: Time that a rank waited before it raised this error.
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

    def __reduce__(self) -> tuple[type[Any], tuple[str, tuple[int, ...], float]]:
        return type(self), (self.phase, self.ranks, self.waited_seconds)


class PeerLostError(RanksError, ConnectionError):
    """Ranks that others waited for are gone: their process has ended, or their host does not answer.

    Args:
        phase: Name of the phase that the ranks were in.
        ranks: Ranks (within the process group) that are lost.
        how: Descriptions of how each rank was lost, in the order of `ranks`.
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

    def __reduce__(self) -> tuple[type[Any], tuple[str, tuple[int, ...], tuple[str, ...]]]:
        return type(self), (self.phase, self.ranks, self.how)


class RankDisagreementError(RanksError, ValueError):
    """Ranks that should do the same thing do different ones; the message says which rank does what."""


class OperationError(RanksError, RuntimeError):
    """An operation cannot go on: it has ended, was used wrongly, or the other ranks no longer wait for this rank."""


@dataclass(frozen=True, slots=True)
class ErrorTypes:
    """The classes of the errors that a coordinator raises: those of this module, or subclasses of them.

    A library that uses a coordinator within its own functions passes subclasses that also derive from the library's
    base error: its users can then catch that base class, and see no name of this package.
    """

    phase_failed: type[PhaseFailedError] = PhaseFailedError
    peer_lost: type[PeerLostError] = PeerLostError
    coordinator_timeout: type[CoordinatorTimeoutError] = CoordinatorTimeoutError
    coordinator_lost: type[CoordinatorLostError] = CoordinatorLostError
    rank_disagreement: type[RankDisagreementError] = RankDisagreementError
    operation: type[OperationError] = OperationError


ERROR_TYPES: Final = ErrorTypes()
"""The classes of this module."""

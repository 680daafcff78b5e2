"""Exceptions that coordinators of ranks raise, and `ErrorTypes`, the record of these classes.

```
RanksError
├─ PhaseFailedError (RuntimeError)          a function raised on a rank during a phase; has rank and traceback
├─ PeerLostError (ConnectionError)          a rank is lost: its process has ended, or its host does not answer
├─ CoordinatorTimeoutError (TimeoutError)   a rank did not arrive at a phase within the deadline
├─ CoordinatorLostError (ConnectionError)   the store or process group through which ranks communicate is lost
├─ RankDisagreementError (ValueError)       ranks call different phases, or with different arguments
├─ StreamError (ConnectionError)            a connection to a rank cannot be made, or is lost; has rank and reason
├─ JobSecretError (ValueError)              the job's secret in the environment cannot be used
└─ OperationError (RuntimeError)            the operation has ended, or its coordinator was used wrongly
```

Each class also derives from the built-in exception in brackets. Messages name the phase, the ranks and a remedy. An
operation, such as a save, is a sequence of phases with one coordinator.
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
    "JobSecretError",
    "OperationError",
    "PeerLostError",
    "PhaseFailedError",
    "RankDisagreementError",
    "RanksError",
    "StreamError",
]


class RanksError(Exception):
    """Base class of all exceptions that `dcp_ranks` raises on purpose."""


class PhaseFailedError(RanksError, RuntimeError):
    """A phase failed on at least one rank; every rank raises this error, with the same `failures`.

    Args:
        msg: Description of the failure; `str(error)` begins with this text.
        failures: Failing rank → (exception, or None if it could not be pickled; traceback as text).
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
        """Failing rank → (exception, or None if it could not be pickled; traceback as text), in the order of ranks."""
        return self._failures

    def __reduce__(self) -> tuple[type[Any], tuple[str, dict[int, tuple[BaseException | None, str]]]]:
        return type(self), (self._message, self._failures)


class CoordinatorLostError(RanksError, ConnectionError):
    """The store or process group through which ranks communicate does not answer any more."""


class CoordinatorTimeoutError(RanksError, TimeoutError):
    """Some ranks did not arrive at a phase before the other ranks' deadline.

    Args:
        phase: Name of the phase that the ranks were in.
        ranks: Ranks (within the process group) that did not arrive.
        waited_seconds: Time in seconds that the other ranks waited.
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
    """Ranks were lost during a phase: their processes have ended, or their hosts do not answer.

    Args:
        phase: Name of the phase that the ranks were in.
        ranks: Ranks (within the process group) that are lost.
        how: Description of each rank's loss, such as "its process has ended", in the order of `ranks`.
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
    """Ranks called different phases, or passed different values where all must be equal; the message lists them."""


class StreamError(RanksError, ConnectionError):
    """A connection to another rank cannot be made, or is lost.

    Args:
        rank: Rank at the other end.
        address: Address at which the rank was reached, or addresses that were tried; empty if none was.
        reason: What went wrong, and what to do about it.
    """

    def __init__(self, rank: int, address: str, reason: str) -> None:
        self.rank = rank
        self.address = address
        self.reason = reason
        super().__init__(f"connection to rank {rank}{f' at {address}' if address else ''}: {reason}")

    def __reduce__(self) -> tuple[type[Any], tuple[int, str, str]]:
        return type(self), (self.rank, self.address, self.reason)


class JobSecretError(RanksError, ValueError):
    """The secret of the job that the environment names cannot be read, is too short, or is named twice."""


class OperationError(RanksError, RuntimeError):
    """An operation cannot continue: it has ended, was used wrongly, or the other ranks no longer wait for this rank."""


@dataclass(frozen=True, slots=True)
class ErrorTypes:
    """The exception classes that a coordinator raises: those of this module, or subclasses of them.

    A library that uses a coordinator internally passes subclasses that also derive from the library's own base
    exception, and its users can then catch that base exception.
    """

    phase_failed: type[PhaseFailedError] = PhaseFailedError
    peer_lost: type[PeerLostError] = PeerLostError
    coordinator_timeout: type[CoordinatorTimeoutError] = CoordinatorTimeoutError
    coordinator_lost: type[CoordinatorLostError] = CoordinatorLostError
    rank_disagreement: type[RankDisagreementError] = RankDisagreementError
    operation: type[OperationError] = OperationError


ERROR_TYPES: Final = ErrorTypes()
"""The exception classes of this module, which coordinators raise by default."""

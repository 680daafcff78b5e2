"""Messages between ranks about one phase: outcomes of the ranks to the coordinator, its verdict (result) back to them.

A failure is sent as text, and as the exception itself only if that survives pickling, so that no exception can prevent
its own report. Nothing here communicates.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Failure", "Outcome", "Step", "Verdict", "failure_of", "format_ranks", "shorten"]

_MAX_TEXT = 64 << 10
_MAX_EXCEPTION_BYTES = 64 << 10
_MAX_FULL_TRACEBACKS = 32


@dataclass(frozen=True, slots=True)
class Step:
    """One phase of one operation: its number from 0, the kind of exchange between ranks, and its name."""

    number: int
    kind: str
    phase: str

    @property
    def label(self) -> str:
        """Text that is equal on all ranks in the same phase."""
        return f"{self.kind} {self.phase!r}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of one rank: the traceback as text, and the exception pickled where that is possible."""

    rank: int
    text: str
    exception: bytes | None

    def revive(self) -> BaseException | None:
        """Return the exception, or None where it cannot be rebuilt in this process."""
        if self.exception is None:
            return None
        try:
            error = pickle.loads(self.exception)
        except Exception:  # noqa: BLE001 - a class of the failing rank's own code may do anything
            return None
        return error if isinstance(error, BaseException) else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one rank's part of a phase: pickled value or failure, label of the phase, and duration in seconds."""

    label: str
    value: bytes | None = None
    failure: Failure | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a phase, the same for every rank: `ok`, or which ranks failed, did not arrive, were lost or disagree.

    `common` is the answer for all ranks; with `scattered` each rank's answer is sent separately. `missing` ranks did
    not arrive in time; `lost` ranks have died, each with the evidence for it; `unheard` ranks were still busy when a
    failure was reported. `slowest` is the rank whose part took longest, and how many seconds that took.
    """

    failures: tuple[Failure, ...] = ()
    missing: tuple[int, ...] = ()
    lost: tuple[tuple[int, str], ...] = ()
    unheard: tuple[int, ...] = ()
    waited_seconds: float = 0.0
    disagreement: str | None = None
    common: bytes | None = None
    scattered: bool = False
    slowest: tuple[int, float] | None = None

    @property
    def ok(self) -> bool:
        """Whether the phase went well on every rank."""
        return not self.failures and not self.missing and not self.lost and self.disagreement is None


def failure_of(rank: int, error: BaseException) -> Failure:
    """Describe an exception of a rank as a `Failure` that can be sent, even if the exception itself cannot."""
    # The outermost frame is the coordinator's own call of the user's function.
    inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
    try:
        text = "".join(traceback.format_exception(type(error), error, inner or error.__traceback__))
    except Exception:  # noqa: BLE001 - an exception's own methods may fail while it is described
        text = f"{type(error).__qualname__} (it cannot be described)\n"
    return Failure(rank, _clip(text), _portable(error))


def shorten(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return the failures in the order of ranks, with whole tracebacks for the first few."""
    ordered = sorted(failures, key=lambda failure: failure.rank)
    whole, rest = ordered[:_MAX_FULL_TRACEBACKS], ordered[_MAX_FULL_TRACEBACKS:]
    return (*whole, *(Failure(each.rank, each.text.rstrip().rpartition("\n")[2], None) for each in rest))


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: `rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


def _portable(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
    except Exception:  # noqa: BLE001 - pickling runs the exception's own code
        return None
    return data if len(data) <= _MAX_EXCEPTION_BYTES else None


def _clip(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"

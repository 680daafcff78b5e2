"""Messages of one phase: each rank's outcome for the coordinator, and the verdict (the phase's result) for all ranks.

A failure contains the traceback as text, and the exception itself only if it can be pickled, so every failure can be
reported. Not in this module: communication.
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
    """One phase of an operation: number (from 0), kind of exchange (`all_gather`, `barrier`, …), and name."""

    number: int
    kind: str
    phase: str

    @property
    def label(self) -> str:
        """Text of kind and name, by which the coordinator checks that all ranks are in the same phase."""
        return f"{self.kind} {self.phase!r}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on one rank: traceback as text, and the pickled exception or None."""

    rank: int
    text: str
    exception: bytes | None

    def revive(self) -> BaseException | None:
        """Unpickle and return the exception; None if it was not pickled or cannot be unpickled in this process."""
        if self.exception is None:
            return None
        try:
            error = pickle.loads(self.exception)
        except Exception:  # noqa: BLE001 - a class of the failing rank's own code may do anything
            return None
        return error if isinstance(error, BaseException) else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a phase's function on one rank: pickled result or failure, the phase's label, duration in seconds."""

    label: str
    value: bytes | None = None
    failure: Failure | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a phase, the same on every rank: success, or the ranks that failed, are missing, lost or disagree.

    `failures` are exceptions on ranks; `missing` ranks did not arrive within `waited_seconds`; `lost` ranks have died,
    each with a description; `unheard` ranks were still busy when a failure was reported. `common` is the pickled return
    value for all ranks; with `scattered`, each rank's return value is sent separately. `slowest` is the rank whose
    function took longest, with the duration in seconds.
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
        """Whether the phase succeeded on every rank."""
        return not self.failures and not self.missing and not self.lost and self.disagreement is None


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return an exception on a rank as a `Failure`, which can be sent even if the exception cannot be pickled."""
    # The outermost frame is the coordinator's own call of the user's function.
    inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
    try:
        text = "".join(traceback.format_exception(type(error), error, inner or error.__traceback__))
    except Exception:  # noqa: BLE001 - an exception's own methods may fail while it is described
        text = f"{type(error).__qualname__} (it cannot be described)\n"
    return Failure(rank, _clip(text), _portable(error))


def shorten(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return the failures in the order of ranks, with shortened tracebacks except for the first few failures."""
    ordered = sorted(failures, key=lambda failure: failure.rank)
    whole, rest = ordered[:_MAX_FULL_TRACEBACKS], ordered[_MAX_FULL_TRACEBACKS:]
    return (*whole, *(Failure(each.rank, each.text.rstrip().rpartition("\n")[2], None) for each in rest))


def format_ranks(ranks: Sequence[int]) -> str:
    """Return a text that lists ranks, such as `rank 3` or `ranks 0-2, 5`."""
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

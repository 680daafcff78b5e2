"""Exceptions of coordinators. Messages name the phase, the ranks and a remedy."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from dcp_base.errors import DcpError

_MAX_CAUSES = 3
_MAX_RANGES = 32
# Names of data files, which differ by rank.
_FILE_OF_RANK = re.compile(r"__\d+_\d+")


class RanksError(DcpError):
    """Base class of errors in the coordination of ranks."""


class CheckpointException(RanksError, RuntimeError):  # noqa: N818 - stock's name
    """A phase failed on at least one rank; every rank raises this error, with the same `failures`.

    The first line of the text has the cause. Equal failures of several ranks are grouped under one traceback.

    Args:
        msg: First words of `str(error)`.
        failures: Failing rank → (exception, or None if it could not be pickled; traceback as text, a
            `traceback.StackSummary` or None).

    Source: torch 2.13 `torch.distributed.checkpoint.api.CheckpointException`, there a BaseException.
    """

    def __init__(
        self, msg: str, failures: Mapping[int, tuple[BaseException | None, str | traceback.StackSummary | None]]
    ) -> None:
        ranks = sorted(failures.items())
        super().__init__(msg, {rank: (error, _as_text(error, trace)) for rank, (error, trace) in ranks})

    def __str__(self) -> str:
        msg, failures = self.args
        groups = _group(failures)
        texts = [f"--- {format_ranks(ranks)} ---\n{text.rstrip()}" for ranks, _, text in groups if text.strip()]
        where = f" (failed on {format_ranks([*failures])}): {_causes(groups)}" if failures else ""
        return "\n".join([f"{msg}{where}", *texts])

    @property
    def summary(self) -> str:
        """Ranks and causes in one line, such as `ranks 0-63: OSError: [Errno 28] No space left on device`."""
        groups = _group(self.failures)
        prefix = f"{format_ranks([*self.failures])}: " if len(groups) == 1 else ""
        return prefix + _causes(groups)

    @property
    def failures(self) -> dict[int, tuple[BaseException | None, str]]:
        """Failing rank → (exception or None, traceback as text), in rank order."""
        found: dict[int, tuple[BaseException | None, str]] = self.args[1]
        return found


class CoordinatorLostError(RanksError, ConnectionError):
    """The store or process group through which ranks communicate does not answer."""


class CoordinatorTimeoutError(RanksError, TimeoutError):
    """Some ranks (within the process group) did not arrive at a phase in the `waited_seconds` of the other ranks.

    `hosts` has the host names that are known.
    """

    def __init__(
        self, phase: str, ranks: Sequence[int], waited_seconds: float, hosts: Mapping[int, str] | None = None
    ) -> None:
        self.phase = phase
        self.ranks = tuple(ranks)
        self.waited_seconds = waited_seconds
        self.hosts = dict(hosts or {})
        super().__init__(
            f"phase {phase!r}: waited {waited_seconds:.1f} s for {format_ranks(self.ranks, self.hosts)}; see what held "
            "them up there, or allow more time with timeout_seconds"
        )

    def __reduce__(self) -> tuple[type[Any], tuple[str, tuple[int, ...], float, dict[int, str]]]:
        return type(self), (self.phase, self.ranks, self.waited_seconds, self.hosts)


class PeerLostError(RanksError, ConnectionError):
    """Ranks were lost during a phase: their processes have ended, or their hosts do not answer.

    `how` says how each of `ranks` (within the process group) was lost, such as "its process has ended".
    """

    def __init__(
        self, phase: str, ranks: Sequence[int], how: Sequence[str], hosts: Mapping[int, str] | None = None
    ) -> None:
        self.phase = phase
        self.ranks = tuple(ranks)
        self.how = tuple(how)
        self.hosts = dict(hosts or {})
        where = f": {format_ranks(self.ranks, self.hosts)}" if self.hosts else ""
        gone = "; ".join(f"rank {rank} is gone ({why})" for rank, why in zip(self.ranks, self.how, strict=True))
        super().__init__(
            f"phase {phase!r}: {gone}; no rank waits any longer. Look for the cause in that rank's own output and in "
            f"its machine's log (out of memory?), and restart the job{where}"
        )

    def __reduce__(self) -> tuple[type[Any], tuple[str, tuple[int, ...], tuple[str, ...], dict[int, str]]]:
        return type(self), (self.phase, self.ranks, self.how, self.hosts)


class StreamError(RanksError, ConnectionError):
    """A connection to another rank cannot be made, or is lost.

    `address` has the addresses that were tried, if any; `reason` is cause and remedy.
    """

    def __init__(self, rank: int, address: str, reason: str) -> None:
        self.rank = rank
        self.address = address
        self.reason = reason
        super().__init__(f"connection to rank {rank}{f' at {address}' if address else ''}: {reason}")

    def __reduce__(self) -> tuple[type[Any], tuple[int, str, str]]:
        return type(self), (self.rank, self.address, self.reason)


class OperationError(RanksError, RuntimeError, ValueError):
    """An operation cannot continue: it ended, was misused, or ranks called different functions or gave up waiting."""


def format_ranks(ranks: Sequence[int], hosts: Mapping[int, str] | None = None) -> str:
    """Return text such as `rank 3` or `ranks 0-2 (node-1), 5`, cut after some ranges."""
    known = hosts or {}
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1 and known.get(rank) == known.get(rank - 1):
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [
        (str(first) if first == last else f"{first}-{last}") + (f" ({known[first]})" if first in known else "")
        for first, last in runs[:_MAX_RANGES]
    ]
    if left := sum(last + 1 - first for first, last in runs[_MAX_RANGES:]):
        words.append(f"and {left:,} more")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


_Group = tuple[list[int], str, str]
"""Ranks that failed equally, the cause in one line, and the first rank's text."""


def _as_text(error: BaseException | None, trace: str | traceback.StackSummary | None) -> str:
    if isinstance(trace, str):
        return trace
    frames = ["Traceback (most recent call last):\n", *trace.format()] if trace else []
    return "".join([*frames, *(traceback.format_exception_only(error) if error is not None else ())])


def _group(failures: Mapping[int, tuple[BaseException | None, str]]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for rank, (error, text) in failures.items():
        cause = _cause(error, text)
        groups.setdefault(_FILE_OF_RANK.sub("", cause), ([], cause, text))[0].append(rank)
    return [*groups.values()]


def _causes(groups: list[_Group]) -> str:
    if len(groups) == 1:
        return groups[0][1]
    said = [f"{format_ranks(ranks)}: {cause}" for ranks, cause, _ in groups[:_MAX_CAUSES]]
    more = len(groups) - len(said)
    return "; ".join([*said, f"and {more} other failures"] if more else said)


def _cause(error: BaseException | None, text: str) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        return error.summary
    if error is not None:
        with contextlib.suppress(Exception):  # the text of a foreign exception may fail; its traceback has the class
            return f"{type(error).__name__}: {error}".partition("\n")[0]
    # The exception follows the last frame, whose lines of code are indented by four.
    last = text.rpartition('\n  File "')[2].split("\n")
    return next((line for line in last[1:] if line and not line.startswith("    ")), last[0])

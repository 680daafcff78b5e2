"""Faults to inject, and the system call at which each one strikes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["KINDS", "WRITING", "Fault", "FaultKind"]

FaultKind = Literal["kill", "torn", "eio", "enospc", "short", "stop"]
KINDS: tuple[str, ...] = get_args(FaultKind)
WRITING = frozenset({"write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range"})
"""System calls that may be torn or short."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject: its kind, and the number of the system call.

    `kill`: SIGKILL instead of the call. `torn`: SIGKILL after half of a write. `eio`: this call fails with EIO.
    `enospc`: this call and all later ones that need space fail with ENOSPC. `short`: a write writes only half, and
    returns that count. `stop`: the process is stopped before the call; see `run_traced`.

    Attributes:
        kind: Kind of the fault, see above.
        at: Number of the call, counted from 1 on.
        rank: Rank whose calls are counted.
        of: Processes whose calls are counted: the rank's own process (`own`), the processes that it started
            (`started`), or both (`all`). The fault strikes the process that makes the call.

    Example:
        ```python
        from pathlib import Path
        from dcp_crash import Fault, run_traced

        settings = Path("settings")
        settings.mkdir()
        run = run_traced(lambda rank: (settings / "new").write_text("b"), settings, fault=Fault("kill", at=1))
        assert run.struck and not run.ranks[0].survived
        ```
    """

    kind: FaultKind
    at: int
    rank: int = 0
    of: Literal["own", "started", "all"] = "own"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is no fault; choose one of {', '.join(map(repr, KINDS))}")
        if self.at < 1:
            raise ValueError(f"at={self.at}: calls are counted from 1 on")

"""Faults that can be injected into traced processes, and the number of the system call at which they occur."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["KINDS", "WRITING", "Fault", "FaultKind"]

FaultKind = Literal["kill", "torn", "eio", "enospc", "short", "stop"]
KINDS: tuple[str, ...] = get_args(FaultKind)
WRITING = frozenset({"write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range"})
"""Names of the system calls that write bytes, which the faults `torn` and `short` can shorten."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject at a system call: its kind, and the number of the call.

    `kill`: the process is killed (SIGKILL) before the call. `torn`: it is killed after half of the bytes are written.
    `eio`: the call fails with EIO. `enospc`: the call and all later calls that need disk space fail with ENOSPC.
    `short`: the call writes half of the bytes and returns their number. `stop`: the process is stopped before the call
    until `held` of `run_traced` returns.

    Attributes:
        kind: Kind of the fault: `kill`, `torn`, `eio`, `enospc`, `short` or `stop`.
        at: Number of the system call among the counted calls on the folder of `run_traced`; the first has number 1.
        rank: Rank whose system calls are counted.
        of: Processes whose system calls are counted: the rank's own process (`own`), the processes that it started
            (`started`), or both (`all`). The fault affects the process that makes the call.

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

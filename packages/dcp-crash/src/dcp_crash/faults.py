"""Faults to inject into traced processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

FaultKind = Literal["kill", "torn", "eio", "enospc", "short", "stop"]
KINDS: tuple[str, ...] = get_args(FaultKind)
WRITING = frozenset({"write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range"})
"""System calls that `torn` and `short` can shorten."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject at a system call.

    ```python
    from pathlib import Path
    from dcp_crash import Fault, run_traced

    settings = Path("settings")
    settings.mkdir()
    run = run_traced(lambda rank: (settings / "new").write_text("b"), settings, fault=Fault("kill", at=1))
    assert run.struck and not run.ranks[0].survived
    ```

    `kill`: SIGKILL before the call. `torn`: SIGKILL after half of the bytes are written. `eio`: the call fails with
    EIO. `enospc`: this and all later calls that need space fail with ENOSPC. `short`: the call writes half of the bytes
    and returns their number. `stop`: the process is stopped before the call until `held` of `run_traced` returns.

    Attributes:
        at: Number of the counted call on the directory of `run_traced`, from 1.
        rank: Rank with counted calls.
        of: Processes with counted calls: the rank's (`own`), those that it started (`started`), or both (`all`). The
            fault affects the calling process. With `all`, `kill` and `torn` kill the rank and all that it started.
    """

    kind: FaultKind
    at: int
    rank: int = 0
    of: Literal["own", "started", "all"] = "own"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not a fault; choose one of {', '.join(map(repr, KINDS))}")
        if self.at < 1:
            raise ValueError(f"at={self.at}: calls are counted from 1")

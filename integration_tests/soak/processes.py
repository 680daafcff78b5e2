"""Looking at processes through /proc, and limiting what they may write."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

__all__ = ["adopt_orphans", "children", "descriptors", "limit_files", "resident_kib", "shared_memory"]

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of processes below this one whose parent ends: none is lost from sight."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")


def children(pid: int) -> list[int]:
    """The processes that a process has started and not yet waited for."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:  # the thread has ended
            continue
    return found


def resident_kib(pid: int) -> int:
    """Memory that a process has; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)


def descriptors(pid: int) -> int:
    """How many files a process has open; 0 if it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def limit_files(pid: int, limit_bytes: int | None) -> None:
    """Have no file of a process grow beyond a limit, as on a full disk; None lifts it. Files that are longer stay."""
    limit = resource.RLIM_INFINITY if limit_bytes is None else limit_bytes
    try:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    except ProcessLookupError:
        return


def shared_memory() -> frozenset[str]:
    """Names of what lies in shared memory."""
    return frozenset(os.listdir("/dev/shm"))

"""Unique identity of a process in a cluster, and watching a process on the same machine until it ends.

Not in this module: which rank watches which.

Source: Linux `pidfd_open(2)`, `proc_pid_stat(5)` (starttime), `random(4)` (boot_id), `pid_namespaces(7)`.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["ProcessIdentity", "own_identity", "watch_process"]

_START_FIELD = 19  # field of /proc/<pid>/stat, counted after the process's name


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Unique identity of a process in a cluster: machine and container, process id (pid), and start time.

    Attributes:
        host: Text of the machine's boot id and the pid namespace; processes with the same `host` see each other's pids.
        pid: Process id within that pid namespace.
        started: Start time of the process in clock ticks since the boot; a later process with the same pid has another
            start time.
    """

    host: str
    pid: int
    started: int


def own_identity() -> ProcessIdentity:
    """Return the identity of this process; also correct in a forked process."""
    try:
        return ProcessIdentity(_host(), os.getpid(), _start_of(os.getpid()))
    except (OSError, ValueError, IndexError):  # not Linux: counts as the only rank on its machine
        return ProcessIdentity(f"unknown {uuid.uuid4().hex}", os.getpid(), 0)


def watch_process(process: ProcessIdentity, own_host: str) -> int | None:
    """Open a file descriptor (pidfd) that becomes readable when a process ends.

    Args:
        process: The process to watch.
        own_host: `ProcessIdentity.host` of this process.

    Returns:
        The file descriptor, which the caller must close; None if the process is on another machine or in another
        container, or the kernel has no pidfd.

    Raises:
        ProcessLookupError: The process has ended.
    """
    if process.host != own_host or not hasattr(os, "pidfd_open"):
        return None
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise
    except OSError:  # a sandbox that does not know the call, or no descriptor left
        return None
    # The descriptor holds the process that has the pid now; only then can its identity be checked.
    with contextlib.suppress(OSError, ValueError, IndexError):
        if _start_of(process.pid) == process.started:
            return descriptor
    os.close(descriptor)
    raise ProcessLookupError(process.pid)


@lru_cache
def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _start_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        # The name, in parentheses, may hold spaces and parentheses.
        return int(file.read().rpartition(")")[2].split()[_START_FIELD])

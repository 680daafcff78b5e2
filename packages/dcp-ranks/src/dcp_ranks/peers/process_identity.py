"""Identity of a rank's process, which no other process ever has, and watching a process of the same machine.

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
    """Identity of one process in the cluster: its machine and container, its process id (pid), and its start time.

    Attributes:
        host: Boot id of the machine, and pid namespace; processes with the same `host` see each other's pids.
        pid: Process id within that namespace.
        started: Clock ticks from the boot to the start of the process, which tell it from a later process with the same
            pid.
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
    """Open a file descriptor that becomes readable when the process has ended, without that process's help.

    Args:
        process: The process to watch.
        own_host: `ProcessIdentity.host` of this process.

    Returns:
        The descriptor, which belongs to the caller; None if the process cannot be seen from here.

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

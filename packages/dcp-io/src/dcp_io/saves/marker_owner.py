"""Identity of the process that wrote a save marker, and whether that process is provably gone."""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import asdict, dataclass

__all__ = ["ProcessIdentity", "can_be_checked", "is_gone", "this_process"]


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identity of a process, which differs for two processes even if they have the same pid at different times."""

    host: str
    boot_id: str
    """Boot id of the running kernel; empty where the system does not provide it."""
    pid_namespace: str
    """Namespace of `pid`; empty where the system does not provide it."""
    pid: int
    start_ticks: int
    """Start of the process, in the system's ticks since boot; 0 where the system does not provide it."""

    def to_dict(self) -> dict[str, str | int]:
        """Return the identity as plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> ProcessIdentity:
        """Rebuild an identity from a result of `to_dict`. Raises KeyError, TypeError or ValueError for other dicts."""
        texts = [values["host"], values["boot_id"], values["pid_namespace"]]
        numbers = [values["pid"], values["start_ticks"]]
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(n, int) for n in numbers):
            raise TypeError("not a process identity")
        host, boot_id, namespace = map(str, texts)
        return cls(host, boot_id, namespace, int(str(numbers[0])), int(str(numbers[1])))


def this_process() -> ProcessIdentity:
    """Return the identity of the running process."""
    return _identity(os.getpid())


def can_be_checked(process: ProcessIdentity) -> bool:
    """Whether `is_gone` can check a process: it has the same host, boot and pid namespace as this process."""
    here = this_process()
    same = (process.host, process.boot_id, process.pid_namespace) == (here.host, here.boot_id, here.pid_namespace)
    return same and process.pid > 0


def is_gone(process: ProcessIdentity) -> bool:
    """Whether the process is certainly no longer running.

    False if this cannot be known: for a process of another host, boot or pid namespace.
    """
    if not can_be_checked(process):
        return False
    try:
        os.kill(process.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    state, threads, ticks = _status(process.pid)
    if state in ("Z", "X") and threads <= 1:  # if it has more threads, one of them may still finish a write
        return True
    return bool(ticks and process.start_ticks and ticks != process.start_ticks)


@functools.lru_cache(maxsize=1)
def _identity(pid: int) -> ProcessIdentity:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
    except OSError:
        boot_id = ""
    return ProcessIdentity(socket.gethostname(), boot_id, namespace, pid, _status(pid)[2])


def _status(pid: int) -> tuple[str, int, int]:
    """Return state letter, number of threads and start ticks of a process; ("", 0, 0) without `/proc`.

    The state is that of the main thread, which may end before the others.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The second field, the name, is in parentheses and may contain any characters.
            fields = file.read().rpartition(")")[2].split()
        return fields[0], int(fields[17]), int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0, 0

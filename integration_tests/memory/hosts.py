"""Pretended hosts of a job, on one machine: the near tier that each has for itself, and its loss.

A near tier is either a folder of each host, or a keeper of each host, whose sockets are in a folder of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

from dcp_io import KeepEvery, KeepLast
from dcp_io.stores import host_store
from dcp_memory import partner
from dcp_tiers import Tier, Tiers
from integration_tests.hosts.pretended import connected_as_hosts

__all__ = ["RUN", "Hosts", "Near", "is_alive", "is_stopped", "keepers_of", "kill", "processes_of"]

Near = Literal["folder", "keeper", "partner"]
"""Folders of each host; keepers; keepers with copies on the partner's host."""
RUN = "campaign"
_NEAR = "/near/run"
_GONE_SECONDS = 60.0


@dataclass(frozen=True)
class Hosts:
    """Hosts of a run, by name, below a folder.

    Args:
        root: The folder; short, since addresses of sockets are.
        near: What the near tier is.
        rate: Limit of promotion in bytes per second; None for none.
    """

    root: Path
    near: Near
    rate: float | None = None

    @property
    def far(self) -> Path:
        """Folder of the tier that all hosts share."""
        return self.root / "far"

    def folder(self, host: str) -> Path:
        """What a host has for itself: the folder of its disk, or of its keeper's socket."""
        return self.root / "hosts" / host

    @property
    def url(self) -> str:
        """Root of the near tier."""
        return _NEAR if self.near == "folder" else f"keeper://{RUN}"

    @property
    def near_url(self) -> str:
        """URI of the near tier, of whatever host this process is on."""
        return f"host://{_NEAR}" if self.near == "folder" else self.url

    def tiers(self) -> Tiers:
        """The tiers of the run; every second step goes to the far one."""
        copies = partner() if self.near == "partner" else None
        return Tiers(
            [
                Tier(self.url, keep=KeepLast(2), per_host=True, copies=copies),
                Tier(self.far, keep=KeepEvery(2), rate_bytes_per_second=self.rate),
            ]
        )

    @contextlib.contextmanager
    def on(self, host: str) -> Iterator[None]:
        """Context manager: this process is on that host."""
        folder = self.folder(host)
        folder.mkdir(parents=True, exist_ok=True)
        with (
            mock.patch.object(host_store, "host_folder", lambda path: f"{folder}{path}"),
            mock.patch.dict(os.environ, {"DCP_KEEPER_DIR": str(folder)}),
        ):
            folder.chmod(0o700)
            yield

    @contextlib.contextmanager
    def job(self, hosts: tuple[str, ...], each: int, rank: int) -> Iterator[None]:
        """Context manager: this process is a rank of a job that has `each` ranks on each of the hosts."""
        with self.on(hosts[rank // each]), connected_as_hosts(len(hosts), each):
            yield

    def lose(self, host: str) -> None:
        """Kill the host's keeper, and remove what it has on its disk. The ranks of the host must be dead."""
        kill(processes_of(self.folder(host)))
        shutil.rmtree(self.folder(host), ignore_errors=True)

    def names(self) -> list[str]:
        """Names of the hosts that have been used and not been lost."""
        folder = self.root / "hosts"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def processes_of(folder: Path) -> list[int]:
    """Return the keepers, and other processes, whose environment or command names a host's folder."""
    found, words = [], os.fsencode(folder)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) == os.getpid():
                continue
            given = (entry / "environ").read_bytes().split(b"\0") + (entry / "cmdline").read_bytes().split(b"\0")
            if any(one.endswith(words) or words + b"/" in one for one in given):
                found.append(int(entry.name))
    return found


def keepers_of(folder: Path) -> list[int]:
    """Return the keepers of a host."""
    found = []
    for pid in processes_of(folder):
        with contextlib.suppress(OSError):
            if b"dcp_memory.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def kill(pids: list[int]) -> None:
    """Kill processes, and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + _GONE_SECONDS
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.002)
    assert not any(map(is_alive, pids)), f"processes {pids} outlive SIGKILL"


def state_of(pid: int) -> str:
    """Return the state of a process as a letter; `X` if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal."""
    return state_of(pid) == "T"


def is_alive(pid: int) -> bool:
    """Whether a process runs; reaps it if it is a child that has ended."""
    if state_of(pid) not in ("Z", "X"):
        return True
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == 0  # some of its threads may still be ending
    return False

"""Control groups (version 1) for processes of a benchmark: a limit of memory, and of the rate of writes to a disk.

Needs root and mounted `memory` and `blkio` controllers. Threads and processes that a member starts are members, too.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["ControlGroup"]

_ROOT = Path("/sys/fs/cgroup")


class ControlGroup:
    """A control group for this process, until the end of a `with` block."""

    def __init__(self) -> None:
        name = f"dcp-bench-{os.getpid()}"
        self._folders = {kind: _ROOT / kind / name for kind in ("memory", "blkio")}
        self._before = {kind: _group_of_this_process(kind) for kind in self._folders}

    def __enter__(self) -> ControlGroup:
        for folder in self._folders.values():
            folder.mkdir()
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        return self

    def __exit__(self, *_: object) -> None:
        for kind, folder in self._folders.items():
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (self._before[kind] / "cgroup.procs").write_text(pid)
            for _attempt in range(50):
                try:
                    folder.rmdir()
                    break
                except OSError:  # a process is just ending
                    time.sleep(0.1)

    def limit_memory(self, nbytes: int | None) -> None:
        """Limit the memory of the group, its part of the page cache included; None for no limit."""
        (self._folders["memory"] / "memory.limit_in_bytes").write_text(str(-1 if nbytes is None else nbytes))

    def memory_bytes(self) -> int:
        """Anonymous and shared memory of the group."""
        lines = (self._folders["memory"] / "memory.stat").read_text().splitlines()
        found = dict(line.split() for line in lines)
        return int(found["rss"]) + int(found["shmem"])

    def limit_writes(self, folder: Path, bytes_per_second: int | None) -> None:
        """Limit what the group writes to the disk of a folder; None for no limit. tmpfs has no such limit."""
        device = os.stat(folder).st_dev
        limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_second or 0}"
        (self._folders["blkio"] / "blkio.throttle.write_bps_device").write_text(limit)


def _group_of_this_process(kind: str) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if kind in controllers.split(","):
            return _ROOT / kind / path.lstrip("/")
    raise RuntimeError(f"this benchmark needs control groups of version 1 with the controller {kind!r}")

"""Free memory of this machine and of the control groups of this process, versions 1 and 2."""

from __future__ import annotations

import os
from collections.abc import Iterator

__all__ = ["available_bytes"]

_GROUPS = "/sys/fs/cgroup"
_CACHE = ("inactive_file", "active_file")


def available_bytes(groups: str = _GROUPS, proc: str = "/proc") -> int:
    """Return how many bytes this process could allocate now, without swapping and without being killed.

    The page cache counts as free, as far as it belongs to files.

    Args:
        groups: Folder in which the control groups are mounted.
        proc: Folder in which the process file system is mounted.
    """
    found = [_machine(proc)]
    for controllers, path in _memberships(proc):
        if "memory" in controllers:
            found += _limits(f"{groups}/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        elif not any(controllers):
            found += _limits(groups, path, "memory.max", "memory.current", "")
    return max(0, min(found))


def _machine(proc: str) -> int:
    for line in _lines(f"{proc}/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memberships(proc: str) -> Iterator[tuple[list[str], str]]:
    for line in _lines(f"{proc}/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        yield controllers.split(","), path


def _limits(mount: str, path: str, limit_name: str, usage_name: str, prefix: str) -> Iterator[int]:
    """Yield the free bytes of a group and of each group above it, as far as they have a limit and are visible here."""
    while True:
        folder = f"{mount}{path}".rstrip("/")
        limit, usage = _number(f"{folder}/{limit_name}"), _number(f"{folder}/{usage_name}")
        if limit is not None and usage is not None and limit < 1 << 60:
            cache = dict(line.split(" ", 1) for line in _lines(f"{folder}/memory.stat") if " " in line)
            yield limit - usage + sum(int(cache.get(prefix + name, 0)) for name in _CACHE)
        if path in ("", "/"):
            return
        path = path.rpartition("/")[0]


def _number(path: str) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []

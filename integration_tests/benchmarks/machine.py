"""What the numbers were taken on, without the machine's name."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["describe"]


def describe(places: Mapping[str, Path]) -> dict[str, str]:
    """Processor, memory, kernel, file systems, Python."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {
        "processor": f"{model[1] if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{int(memory[1]) / 2**20:.0f} GiB" if memory else "unknown",
        "system": f"Linux {platform.release().split('-')[0]}",
        "Python": platform.python_version(),
        **{place: _file_system(folder) for place, folder in places.items()},
    }


def _file_system(folder: Path) -> str:
    """The type of the file system that holds a folder."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    above = [(len(each[1]), each[2]) for each in mounts if folder.is_relative_to(each[1])]
    return max(above)[1] if above else "unknown"

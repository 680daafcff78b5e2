"""What an operation costs this process: wall time, memory above what was held before, and the kernel's I/O counters."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["Cost", "give_back_freed_blocks", "measure"]

Cost = dict[str, float]
_COUNTERS = ("rchar", "wchar", "read_bytes", "write_bytes")
_M_MMAP_THRESHOLD = -3


def give_back_freed_blocks() -> None:
    """From now on, malloc gives blocks of 1 MiB and more back when they are freed, whatever this process did before."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def measure(operation: Callable[[], None]) -> Cost:
    """Seconds, peak bytes and I/O counters of one call. Peak: resident memory, mapped files included."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or memory that an earlier call left with malloc would hide what this one needs
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    held, io_before = _peak_bytes(), _io()
    start = time.perf_counter()
    operation()
    seconds = time.perf_counter() - start
    io_after, peak = _io(), _peak_bytes()
    return {
        "seconds": seconds,
        "peak_bytes": peak - held,
        **{name: io_after[name] - io_before[name] for name in _COUNTERS},
    }


def _peak_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def _io() -> dict[str, int]:
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in lines}

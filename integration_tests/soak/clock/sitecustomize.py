"""Puts a process on a wall clock that somebody else can move: `time.time()` plus what the file of DCP_SOAK_CLOCK says.

Imported by Python at start where this folder is on its path. The monotonic clock, and the times that the kernel gives
to files, are left alone, as when a host's clock is set.
"""

import mmap
import os
import struct
import time

_real, _real_ns = time.time, time.time_ns


def _install(path: str) -> None:
    with open(path, "rb") as file:
        shared = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)

    def shift() -> float:
        seconds: float = struct.unpack("<d", shared[:8])[0]
        return seconds

    time.time = lambda: _real() + shift()
    time.time_ns = lambda: _real_ns() + int(shift() * 1e9)


if "DCP_SOAK_CLOCK" in os.environ:
    _install(os.environ["DCP_SOAK_CLOCK"])

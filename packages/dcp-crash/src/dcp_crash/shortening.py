"""Short writes: the byte count of a write system call is halved before the kernel runs the call."""

from __future__ import annotations

import struct
from collections.abc import Callable

from dcp_crash import kernel
from dcp_crash.calls import Memory

__all__ = ["shorten"]

# Which register holds the bytes of a call that has no vectors.
_COUNTS = {"write": "rdx", "pwrite64": "rdx", "sendfile": "r10", "copy_file_range": "r8"}


def shorten(tid: int, name: str, values: kernel.Registers) -> Callable[[], None]:
    """Halve the number of bytes of the write that a stopped thread is about to make.

    Args:
        tid: Id of the stopped thread.
        name: Name of the system call.
        values: Registers of the thread, which the function may change.

    Returns:
        Function that undoes changes in the memory of the thread (lengths in a vector of buffers; none for a plain
            `write`); call it after the write.
    """
    if name in _COUNTS:
        register = _COUNTS[name]
        setattr(values, register, _half(getattr(values, register)))
        kernel.set_registers(tid, values)
        return lambda: None
    _, address, count = values.arguments[:3]
    memory = Memory(tid)
    vectors = memory.vectors(address, count)
    left = _half(sum(size for _, size in vectors))
    shorter = []
    for start, size in vectors:
        shorter.append(struct.pack("QQ", start, min(size, left)))
        left -= min(size, left)
    before = memory.read(address, 16 * count)
    memory.write(address, b"".join(shorter))
    return lambda: memory.write(address, before)


def _half(count: int) -> int:
    """Return half of a length; a length of one stays, since such a write cannot be shortened."""
    return count // 2 if count > 1 else count

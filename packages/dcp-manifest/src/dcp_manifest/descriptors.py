"""Calls of the system: opening without leaked file descriptors after a KeyboardInterrupt, and those Python has not."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

__all__ = ["kernel_call", "open_descriptor"]


def open_descriptor(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
    """Open a file like `os.open`; if a signal handler raises an error meanwhile, no descriptor and no new file remain.

    With `os.open` alone, a KeyboardInterrupt can be raised after the system call but before the descriptor is assigned,
    and the descriptor stays open.

    Args:
        path: Path of the file.
        flags: Flags of `os.open`; after an interrupt, a file created with `O_EXCL` is removed again.
        mode: Permissions of a created file, as for `os.open`.

    Raises:
        OSError: The system call failed.
    """
    opened: list[int] = []
    try:
        opened.extend(map(os.open, (path,), (flags,), (mode,)))  # a single bytecode step
        return opened[0]
    except BaseException:
        for descriptor in opened:
            os.close(descriptor)
            if flags & os.O_EXCL:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        raise


@functools.cache
def kernel_call(name: str, *types: Any) -> Callable[..., int] | None:
    """Return a call of the system, from the C library; None where there is none.

    Args:
        name: Name of the function, which returns an int and sets `errno` (see `ctypes.get_errno`).
        types: Types of its arguments.
    """
    try:
        function: Any = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):  # not Linux
        return None
    function.argtypes, function.restype = types, ctypes.c_int
    found: Callable[..., int] = function
    return found

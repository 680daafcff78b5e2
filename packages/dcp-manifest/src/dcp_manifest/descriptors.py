"""Opening of files without leaked file descriptors after a KeyboardInterrupt."""

from __future__ import annotations

import contextlib
import os

__all__ = ["open_descriptor"]


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

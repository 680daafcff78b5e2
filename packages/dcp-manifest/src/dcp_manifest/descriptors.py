"""Opening file descriptors safely: a KeyboardInterrupt leaves none behind. Reading and writing are elsewhere."""

from __future__ import annotations

import contextlib
import os

__all__ = ["open_descriptor"]


def open_descriptor(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
    """Open a file like `os.open`; a signal whose handler raises meanwhile leaves no descriptor, and no new file.

    With `os.open` alone, a KeyboardInterrupt that comes while the system opens the file is raised when the call has
    returned, before the descriptor is assigned to anything.

    Args:
        path: The file.
        flags: As for `os.open`; a file that `O_EXCL` made is removed again.
        mode: As for `os.open`.

    Raises:
        OSError: The system refused.
    """
    opened: list[int] = []
    try:
        opened.extend(map(os.open, (path,), (flags,), (mode,)))  # one step of the interpreter
        return opened[0]
    except BaseException:
        for descriptor in opened:
            os.close(descriptor)
            if flags & os.O_EXCL:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        raise

"""Warnings and errors about savers that were not closed before garbage collection or the interpreter's exit."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator

from dcp_async.errors import SaverClosedError
from dcp_core import DcpError

__all__ = ["naming_the_end", "warn_dropped"]


@contextlib.contextmanager
def naming_the_end() -> Iterator[None]:
    """Context manager that raises a clear error if a thread cannot be started because the interpreter exits."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DcpError) or threading.main_thread().is_alive():
            raise
        raise SaverClosedError(
            f"the interpreter is ending ({error}), so that no save can begin in the background any more: save with "
            "`save`, or before the program's end"
        ) from error


def warn_dropped(name: str, owner: int) -> None:
    """Warn that a saver was garbage-collected without `close`; does nothing in a forked child. A finalizer.

    Args:
        name: Kind of the saver, such as `thread`.
        owner: Id of the process that made the saver.
    """
    if os.getpid() == owner:
        warnings.warn(
            f"a {name} saver was dropped without close(): its resources are released once its saves have ended, but "
            "nothing waits for them, and failures are only logged. Use it as a context manager, or close it",
            ResourceWarning,
            stacklevel=3,  # the caller of the finalizer
        )

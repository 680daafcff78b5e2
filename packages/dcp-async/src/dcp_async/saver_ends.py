"""Messages about a saver that ends without `close`: dropped by its owner, or at the interpreter's exit."""

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
    """Context manager that explains why a thread cannot be started, if the reason is the interpreter's exit."""
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
    """Warn of a saver without references, in the process that made it; a finalizer.

    Args:
        name: Kind of the saver.
        owner: Id of the process that made it.
    """
    if os.getpid() == owner:
        warnings.warn(
            f"a {name} saver was dropped without close(): its resources are released once its saves have ended, but "
            "nothing waits for them, and failures are only logged. Use it as a context manager, or close it",
            ResourceWarning,
            stacklevel=3,  # the caller of the finalizer
        )

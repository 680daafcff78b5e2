"""Retries of requests to an fsspec file system, and errors that name the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dcp_io import Attempts
from dcp_manifest.errors import DcpError

__all__ = ["repeated"]

T = TypeVar("T")

# Implementations retry by themselves what they know to be passing; this is for what they let through.
_ATTEMPTS = 4
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, DcpError)


def repeated(what: str, function: Callable[[], T], *, attempts: int = _ATTEMPTS) -> T:
    """Send a request, retry it after transient errors, and return its result.

    Args:
        what: Description of the request with its path, for error messages.
        function: Function that makes the request; may be called several times.
        attempts: Limit of the number of attempts; 1 for requests that must not be carried out twice.

    Raises:
        FileNotFoundError, FileExistsError, PermissionError: The storage reports this error for the path.
        StorageError: The last attempt failed, or a retry is useless; the message has the number of attempts.
    """
    made = Attempts(what, attempts)
    while True:
        try:
            return function()
        except _FINAL:
            raise
        except Exception as error:  # implementations raise what their own clients do, not only OSError
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, (TypeError, NotImplementedError)) or not made.wait(message):
                raise made.failure(message, "check the connection and the service") from error

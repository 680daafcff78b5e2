"""Calls to a file system of fsspec: bounded retries, and errors that say what was asked for."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from dcp_io import StorageError
from dcp_manifest.errors import DcpError

__all__ = ["TruncatedError", "repeated"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Implementations retry by themselves what they know to be passing; this is for what they let through.
_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.1
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, DcpError)


class TruncatedError(OSError):
    """An answer was shorter than what was asked for."""


def repeated(what: str, function: Callable[[], T], *, attempts: int = _ATTEMPTS) -> T:
    """The result of a request, tried again when it fails for reasons that may pass.

    Args:
        what: The request and its path, for messages.
        function: May be called several times.
        attempts: How often; 1 for what must not be carried out twice.

    Raises:
        FileNotFoundError, FileExistsError, PermissionError: What the storage says of the path.
        StorageError: It failed for good; says how often it was tried.
    """
    started = time.monotonic()
    for attempt in range(1, attempts + 1):
        try:
            return function()
        except _FINAL:
            raise
        except Exception as error:  # implementations raise what their own clients do, not only OSError
            seconds = time.monotonic() - started
            told = f"{type(error).__name__}: {error}"
            if attempt == attempts or isinstance(error, (TypeError, NotImplementedError)):
                raise StorageError(
                    f"{what}: failed after {attempt} attempt{'s' * (attempt > 1)} in {seconds:.1f} s: {told}; check "
                    "the connection and the service"
                ) from error
            _log.warning("%s failed (attempt %d of %d), trying again: %s", what, attempt, attempts, told)
        time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.5))  # noqa: S311 - spreads clients
    raise AssertionError("not reached")  # pragma: no cover

"""`Attempts`: retries of a request to a remote storage, with random exponential pauses."""

from __future__ import annotations

import math
import random
import time

from dcp_io.errors import StorageError
from dcp_manifest.logs import library_logger

__all__ = ["Attempts", "TruncatedError"]

_log = library_logger(__name__)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0


class TruncatedError(OSError):
    """A response of a remote storage has fewer bytes than requested."""


class Attempts:
    """Retry counter of one request: limits number and time of attempts, and waits random, growing pauses between them.

    Args:
        what: Description of the request and its object, for messages; must not contain secrets.
        limit: Limit of the number of attempts.
        deadline_seconds: Time after which no further attempt is begun.

    Example:
        ```python
        from dcp_io import Attempts

        attempts = Attempts("GET settings", limit=4, deadline_seconds=60)
        while True:
            try:
                answer = b"ok"  # the request
                break
            except ConnectionError as error:
                if not attempts.wait(str(error)):
                    raise attempts.failure(str(error), "check the network") from error
        ```
    """

    def __init__(self, what: str, limit: int, *, deadline_seconds: float = math.inf) -> None:
        self._what = what
        self._limit = limit
        self._deadline_seconds = deadline_seconds
        self._started = time.monotonic()
        self.number = 1
        """Number of the current attempt."""

    def wait(self, message: str) -> bool:
        """Log that the attempt failed, and wait before the next one; returns False at once if no attempt is left.

        Args:
            message: Description of the failure; must not contain secrets.
        """
        longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**self.number)
        pause = longest * random.uniform(0.3, 1.0)  # noqa: S311 - spreads clients, no secret
        if self.number >= self._limit or time.monotonic() - self._started + pause > self._deadline_seconds:
            return False
        _log.warning("%s failed (attempt %d of %d), trying again: %s", self._what, self.number, self._limit, message)
        time.sleep(pause)
        self.number += 1
        return True

    def failure(self, message: str, remedy: str) -> StorageError:
        """Return the error to raise after the last attempt; its message has the attempts, the duration and the remedy.

        Args:
            message: Description of the last failure; must not contain secrets.
            remedy: What the user can do, as a clause.
        """
        seconds, plural = time.monotonic() - self._started, "s" * (self.number > 1)
        return StorageError(
            f"{self._what}: failed after {self.number} attempt{plural} in {seconds:.1f} s: {message}; {remedy}"
        )

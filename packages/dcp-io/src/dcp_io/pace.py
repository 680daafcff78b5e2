"""`Pace`: limit of the rate at which bytes pass."""

from __future__ import annotations

import time

__all__ = ["Pace"]


class Pace:
    """Limit of a rate: a call with a number of bytes returns when that many may have passed.

    Args:
        bytes_per_second: The rate; None for no limit.

    Example:
        ```python
        from dcp_io import Pace

        pace = Pace(bytes_per_second=100e6)
        for piece in (b"a" * 1_000, b"b" * 2_000):
            pace(len(piece))
        ```
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._due = 0.0

    def __call__(self, count: int) -> None:
        """Wait until `count` more bytes are within the rate."""
        if self._rate is None:
            return
        self._due = max(self._due, time.monotonic()) + count / self._rate
        time.sleep(max(0.0, self._due - time.monotonic()))

"""`ConcurrencyLimit`: how many pieces a rank reads at once, so that a slow one has begun little in the end."""

from __future__ import annotations

__all__ = ["ConcurrencyLimit"]

# No other rank takes over a read that has begun, so each should be short.
_SHORT_SECONDS, _LONG_SECONDS = 0.5, 1.0


class ConcurrencyLimit:
    """Number of pieces that a rank reads at once. Not thread-safe: callers hold a lock.

    A rank begins with one piece. It reads one more at once after each read that was short, and one less after each that
    was long.

    Args:
        most: The most pieces at once, at least 1.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = 1
        self._begun = 0

    @property
    def allows_another(self) -> bool:
        """Whether another read may begin now."""
        return self._begun < self._limit

    def begin(self) -> None:
        """Count a read that begins."""
        self._begun += 1

    def end(self, seconds: float) -> None:
        """Count a read that has ended, and took so many seconds."""
        self._begun -= 1
        if seconds < _SHORT_SECONDS:
            self._limit = min(self._most, self._limit + 1)
        elif seconds > _LONG_SECONDS:
            self._limit = max(1, self._limit - 1)

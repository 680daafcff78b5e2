"""`Progress`: how much of an epoch all ranks together have consumed, and which iterator counts it."""

from __future__ import annotations

__all__ = ["Progress"]


class Progress:
    """Count of the consumed samples of an epoch. One iterator at a time counts: the newest one.

    Attributes:
        epoch: Number of the epoch, from 0.
        samples: Samples of the epoch that all ranks together have consumed.
        iterated: Whether this process has begun to iterate in this epoch.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.samples = 0
        self.iterated = False
        self._counter: object | None = None

    def move(self, epoch: int, samples: int) -> None:
        """Set the place; no iterator that exists counts any more."""
        self.epoch, self.samples = epoch, samples
        self.iterated = False
        self._counter = None

    def begin(self, counter: object) -> None:
        """Let an iterator count from here, and no other."""
        self.iterated = True
        self._counter = counter

    def check(self, counter: object) -> None:
        """Raise a RuntimeError if the iterator does not count any more."""
        if self._counter is not counter:
            raise RuntimeError(
                "this iterator has ended: a newer one counts now, or the position was set since it began. Take a new "
                "one, which continues at the position"
            )

    def release(self, counter: object) -> None:
        """End the counting of an iterator, if it still counts."""
        if self._counter is counter:
            self._counter = None

    @property
    def is_counted(self) -> bool:
        """Whether an iterator counts."""
        return self._counter is not None

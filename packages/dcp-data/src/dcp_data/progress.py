"""The samples of an epoch that all ranks have consumed, and the iterator that counts them."""

from __future__ import annotations


class Progress:
    """Samples of an epoch that all ranks have consumed. Only the newest iterator counts."""

    def __init__(self) -> None:
        self.epoch = 0
        self.samples = 0
        self.iterated = False
        self._counter: object | None = None

    def move(self, epoch: int, samples: int) -> None:
        """Set the place and stop all iterators from counting."""
        self.epoch, self.samples = epoch, samples
        self.iterated = False
        self._counter = None

    def begin(self, counter: object) -> None:
        """Let only this iterator count from here."""
        self.iterated = True
        self._counter = counter

    def check(self, counter: object) -> None:
        """Raise a RuntimeError if it no longer counts."""
        if self._counter is not counter:
            raise RuntimeError(
                "this iterator has ended: a newer one counts now, or the position was set since it began. Take a new "
                "one, which continues at the position"
            )

    def release(self, counter: object) -> None:
        """Stop an iterator from counting."""
        if self._counter is counter:
            self._counter = None

    @property
    def is_counted(self) -> bool:
        """Whether an iterator counts."""
        return self._counter is not None

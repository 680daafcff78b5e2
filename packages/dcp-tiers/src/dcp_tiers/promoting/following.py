"""What a promoter hears of the trainer that started it: lines on standard input, until it ends. See `promote`."""

from __future__ import annotations

import os
import select
import time

from dcp_tiers.promoter_lock import PromoterLock
from dcp_tiers.promoter_process import END
from dcp_tiers.tiers import Tiers
from dcp_tiers.waiting import steps_that_can_come

__all__ = ["Trainer", "stand_by"]

_LOOK_SECONDS, _ASK_SECONDS = 0.5, 10.0


class Trainer:
    """The trainer at the other end of a pipe. It has ended when it says so, the pipe ends, or its process.

    Args:
        descriptor: File descriptor of the pipe.
        is_parent: Whether the trainer is the parent process: children that it has forked may hold the pipe longer.
    """

    def __init__(self, descriptor: int, *, is_parent: bool) -> None:
        self._descriptor = descriptor
        self._parent = os.getppid() if is_parent else None
        self.has_ended = False
        """Whether the trainer has ended."""
        self.has_saved = False
        """Whether a line has come."""

    def wait(self, seconds: float) -> bool:
        """Wait for a line at most `seconds`; returns whether one has come, or the trainer has ended."""
        if select.select([self._descriptor], [], [], seconds)[0]:
            heard = os.read(self._descriptor, 1 << 16)
            self.has_ended = not heard or END in heard
            self.has_saved = self.has_saved or heard not in (b"", END)
            return True
        self.has_ended = self._parent is not None and os.getppid() != self._parent
        return self.has_ended


def stand_by(tiers: Tiers, lock: PromoterLock, trainer: Trainer, seconds: float) -> bool:
    """Wait while another promoter of the run has the lock, and pass on to it that there are new checkpoints.

    Args:
        tiers: The tiers of the run.
        lock: The lock.
        trainer: The trainer that started this process.
        seconds: Time without progress of the other after which to give up, once the trainer has ended.

    Returns:
        Whether this process has the lock now; False if the trainer has ended, and this process has nothing to do.
    """
    left: set[int] | None = None
    changed = asked = time.monotonic()
    while not lock.take():
        if not trainer.has_ended:
            if trainer.wait(_LOOK_SECONDS):
                lock.ask()
                changed = asked = time.monotonic()
            continue
        if not trainer.has_saved:  # what waits is for the other one to bring, for which nobody waits here
            return False
        now, before, left = time.monotonic(), left, steps_that_can_come(tiers)
        changed = now if left != before else changed
        if not left or now - changed > seconds:
            return False
        if now - asked > _ASK_SECONDS:
            lock.ask()
            asked = now
        time.sleep(_LOOK_SECONDS)
    return True

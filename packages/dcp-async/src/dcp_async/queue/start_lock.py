"""`Entry`: a lock that prevents changes of tensors while a save starts or copies them.

Not in this module: the order of saves (`save_queue`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from dcp_async.errors import NestedSaveError

__all__ = ["Entry"]


class Entry:
    """Lock of a saver: either a save starts or copies tensors, or a thread changes tensors inside `lock`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entered_by: int | None = None
        self._copies = 0
        """Number of copies that continue after the call that began them has returned."""
        self._locked_by: int | None = None
        self._depth = 0

    @property
    def locked_here(self) -> bool:
        """Whether this thread is inside `lock`."""
        return self._locked_by == threading.get_ident()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Context manager: no other thread starts a save or copies tensors while this thread is inside the block.

        The same thread may enter further such blocks and start saves inside the block.
        """
        here = threading.get_ident()
        with self._changed:
            # A thread may change values while it begins its own save (in the caller's `state_dict()`).
            self._changed.wait_for(lambda: self._may_lock(here))
            self._locked_by = here
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._locked_by = None
                    self._changed.notify_all()

    def enter(self, seconds: float) -> bool:
        """Acquire the lock for the start of a save; returns False after `seconds` without success.

        Until `leave`, no other thread can enter `lock`, so tensors stay unchanged.

        Raises:
            NestedSaveError: This thread is already starting a save.
        """
        here = threading.get_ident()
        with self._changed:
            if self._entered_by == here:
                raise NestedSaveError(
                    "a save was started while this thread was starting one (in a state_dict(), a stager or a signal's "
                    "handler): let the first call return before the next one"
                )
            free = self._changed.wait_for(lambda: self._may_enter(here), seconds)
            if free:
                self._entered_by = here
            return free

    def leave(self) -> None:
        """Release the lock after the start of a save, even if the start failed."""
        with self._changed:
            self._entered_by = None
            self._changed.notify_all()

    def copy_later(self) -> Callable[[], None]:
        """Announce a copy that continues after `leave`: no thread can enter `lock` before the copy has ended.

        Returns:
            Function to call when the copy has ended.
        """
        with self._changed:
            self._copies += 1
        return self._end_copy

    def _end_copy(self) -> None:
        with self._changed:
            self._copies -= 1
            self._changed.notify_all()

    def _may_lock(self, here: int) -> bool:
        if self._locked_by is not None:
            return self._locked_by == here
        return not self._copies and self._entered_by in {None, here}

    def _may_enter(self, here: int) -> bool:
        return self._entered_by is None and self._locked_by in {None, here}

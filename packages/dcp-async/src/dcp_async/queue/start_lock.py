"""Who may begin a save, and who may change values.

Both are had together or not at all, so that nobody who holds one of them waits for the other.

Not here: which save comes after which (`save_queue`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from dcp_async.errors import NestedSaveError

__all__ = ["Entry"]


class Entry:
    """One thread at a time begins a save; one thread at a time may change values, and none while values are copied."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entered_by: int | None = None
        self._copies = 0
        """Those that outlive the call that began them."""
        self._locked_by: int | None = None
        self._depth = 0

    @property
    def locked_here(self) -> bool:
        """Whether this thread is inside `lock`."""
        return self._locked_by == threading.get_ident()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Values may change inside; this thread may lock again, and save."""
        here = threading.get_ident()
        with self._changed:
            # What a thread does while it begins a save of its own (`state_dict()` of the caller's) is up to it.
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
        """Wait until no other thread begins a save or has locked; whether that was so in time.

        From then on nobody can lock, so that values stay as they are until `leave`.

        Raises:
            NestedSaveError: This very thread is beginning a save.
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
        """The save has begun, or has failed to."""
        with self._changed:
            self._entered_by = None
            self._changed.notify_all()

    def copy_later(self) -> Callable[[], None]:
        """Let values stay after `leave`, too, until what this gives is called."""
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

"""Fence: a check, right before publishing, that the other ranks still wait for the coordinator in this phase.

If the coordinator is suspended for longer than the deadline, the other ranks stop waiting and raise; when the
coordinator resumes, it must not publish any more. Not in this module: how a coordinator detects this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["check_fence", "fenced"]

_check: ContextVar[Callable[[], None] | None] = ContextVar("_check", default=None)


@contextmanager
def fenced(check: Callable[[], None]) -> Iterator[None]:
    """Context manager: inside the block, `check_fence` calls `check` in this thread.

    Args:
        check: Function that raises if the other ranks have ended the phase.
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def check_fence() -> None:
    """Raise if the other ranks have ended the current phase without the coordinator; do nothing outside phases.

    Call it in a `reduce_fn` right before a step that cannot be undone: `finish` of a storage writer calls it right
    before publishing.

    Raises:
        OperationError: The other ranks have ended the phase, or can no longer be reached.

    Ranks: the coordinator.
    """
    check = _check.get()
    if check is not None:
        check()

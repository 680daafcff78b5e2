"""Fence against publishing late: checks inside a phase whether the other ranks have abandoned it.

While a rank is suspended for longer than the deadline, the other ranks stop waiting for it: when it resumes, it must
not publish any more. Not in this module: how a coordinator detects this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["check_fence", "fenced"]

_check: ContextVar[Callable[[], None] | None] = ContextVar("_check", default=None)


@contextmanager
def fenced(check: Callable[[], None]) -> Iterator[None]:
    """Install `check` for the block, in this thread: `check_fence` calls it; it raises if the phase was abandoned."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def check_fence() -> None:
    """Raise if the other ranks have abandoned the phase in which this is called; return otherwise, and outside phases.

    For a `reduce_fn` that makes something final: a storage writer's `finish` calls it right before it publishes.

    Raises:
        OperationError: The other ranks have ended the phase, or can no longer be reached.

    Ranks: the coordinator.
    """
    check = _check.get()
    if check is not None:
        check()

"""Default number of writer and reader threads, which depends on the machine's cores."""

from __future__ import annotations

import os

__all__ = ["default_thread_count"]

_MAX_DEFAULT_THREADS = 8


def default_thread_count() -> int:
    """Return the default number of threads: the number of cores that this process may use, at most 8."""
    return max(1, min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0))))

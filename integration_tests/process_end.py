"""Whether a process has ended, for any process of this machine."""

from __future__ import annotations

import os
import select

__all__ = ["has_ended"]


def has_ended(pid: int) -> bool:
    """Whether a process has ended with all its threads, so that its files are closed; nobody need have waited for it.

    The state in /proc is that of the main thread, which a signal may end before the others.
    """
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([end], [], [], 0)[0])
    finally:
        os.close(end)

"""Proof that two ranks are of one host: each reads memory that the other wrote, through a descriptor from the other.

Host names, boot ids and paths can be equal on different hosts, and a Unix socket can be forwarded to another host; a
descriptor can only be passed within one kernel. Not in this module: the connection over which descriptors are passed.

Source: Linux `memfd_create(2)`, `unix(7)` (SCM_RIGHTS).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["holds", "lend"]


@contextmanager
def lend(content: bytes) -> Iterator[int]:
    """Context manager that makes a memory file (memfd) with these bytes; returns its descriptor, to pass on inside.

    Raises:
        OSError: This process has no descriptor or memory left, or may not make memory files.
    """
    descriptor = os.memfd_create("dcp-host-proof")
    try:
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)


def holds(descriptor: int, content: bytes) -> bool:
    """Return whether the memory file behind a descriptor holds exactly these bytes.

    Only for a descriptor from an authenticated rank: reading a file that somebody else chose might block.
    """
    try:
        return hmac.compare_digest(os.pread(descriptor, len(content) + 1, 0), content)
    except OSError:
        return False

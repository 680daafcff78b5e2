"""Frames of a stream: a head of fixed size, a message, and a payload of any size.

Not in this module: sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

__all__ = ["GOODBYE", "HEAD", "MAX_MESSAGE_BYTES", "MESSAGE", "advance", "byte_views", "write_head"]

HEAD: Final = struct.Struct("<BBIQ")
"""Kind of frame, number of descriptors (0 or 1), size of the message and size of the payload in bytes."""

MESSAGE: Final = 1
GOODBYE: Final = 2
MAX_MESSAGE_BYTES: Final = 64 << 10
"""Largest size of a message in bytes; payloads have no limit."""


def write_head(kind: int, message: bytes, payload_bytes: int, *, descriptor: bool) -> bytes:
    """Return the first bytes of a frame: head and message.

    Raises:
        ValueError: The message is too long.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"the message has {len(message)} bytes; a message has at most {MAX_MESSAGE_BYTES}: send more as its payload"
        )
    return HEAD.pack(kind, descriptor, len(message), payload_bytes) + message


def byte_views(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return the buffers as views of bytes, without empty ones.

    Raises:
        TypeError: A buffer is not contiguous.
    """
    return [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]


def advance(views: list[memoryview], sent_bytes: int) -> None:
    """Remove the first `sent_bytes` bytes from a list of views, in place."""
    done = 0
    for view in views:
        if len(view) > sent_bytes:
            break
        sent_bytes -= len(view)
        done += 1
    del views[:done]
    if sent_bytes:
        views[0] = views[0][sent_bytes:]

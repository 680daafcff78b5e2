"""Frames on the socket between a keeper and its clients: a fixed head, JSON, and a payload of bytes. No pickle.

A client sends a request and waits for the answer; only answers carry descriptors. Used by both sides, so that nothing
here imports more than the standard library: a keeper starts quickly.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

__all__ = [
    "EXTENT", "GREETING_BYTES", "HEAD", "JSON_BYTES", "PAGE_BYTES", "PAYLOAD_BYTES", "VERSION",
    "FrameError", "decode_head", "decode_json", "encode",
]  # fmt: skip

VERSION = 1
"""Version of the protocol, which client and keeper must have in common."""
HEAD = struct.Struct("<4sHHIQ")
"""Head of a frame: magic, version, whether a descriptor comes with it, size of the JSON, size of the payload."""
EXTENT = struct.Struct("<QQQ")
"""Extent of an object: inode of the segment, offset in it, length; bytes."""
PAGE_BYTES = 4096
"""Unit in which ranges of segments are given to objects."""
JSON_BYTES = 1 << 20
"""Limit of the JSON of a frame."""
PAYLOAD_BYTES = 1 << 28
"""Limit of the payload of a frame."""
GREETING_BYTES = 1 << 12
"""Limit of JSON and payload together before a client has said what it is."""
_MAGIC = b"DCPK"


class FrameError(ValueError):
    """The bytes are not a frame of this protocol, or the frame exceeds a limit."""


def encode(fields: Mapping[str, Any], payload_bytes: int = 0, *, descriptor: bool = False) -> bytes:
    """Return head and JSON of a frame; its payload follows on the socket.

    Args:
        fields: Content of the JSON object.
        payload_bytes: Size of the payload.
        descriptor: Whether a file descriptor comes with the first byte.
    """
    text = json.dumps(fields, separators=(",", ":")).encode()  # ASCII, so that any string survives
    if len(text) > JSON_BYTES or payload_bytes > PAYLOAD_BYTES:
        raise FrameError(f"a frame of {len(text):,} and {payload_bytes:,} bytes exceeds the limits of the protocol")
    return HEAD.pack(_MAGIC, VERSION, int(descriptor), len(text), payload_bytes) + text


def decode_head(data: bytes | bytearray | memoryview, limit_bytes: int | None = None) -> tuple[bool, int, int]:
    """Return whether a descriptor comes with a frame, and the sizes of its JSON and payload.

    Args:
        data: The head.
        limit_bytes: Limit of JSON and payload together; None for the limits of the protocol.

    Raises:
        FrameError: This is not the head of a frame, or it exceeds a limit.
    """
    magic, version, descriptor, json_bytes, payload_bytes = HEAD.unpack(data)
    if magic != _MAGIC or version != VERSION or descriptor > 1:
        raise FrameError(f"not a frame of version {VERSION} of the protocol of keepers")
    if json_bytes > JSON_BYTES or payload_bytes > PAYLOAD_BYTES:
        raise FrameError("the frame exceeds the limits of the protocol")
    if limit_bytes is not None and json_bytes + payload_bytes > limit_bytes:
        raise FrameError("the first frame of a connection is small")
    return bool(descriptor), json_bytes, payload_bytes


def decode_json(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return the fields of a frame. Raises FrameError for anything but a JSON object."""
    try:
        fields = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise FrameError("the frame holds no JSON") from error
    if not isinstance(fields, dict):
        raise FrameError("the frame holds no JSON object")
    return fields

"""Frames between a keeper and its clients: a fixed head, JSON, and a payload of bytes. No pickle.

Each request gets one answer; only answers carry descriptors. Imports the standard library alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

VERSION = 1
HEAD = struct.Struct("<4sHHIQ")
"""Magic, version, whether a descriptor follows, size of the JSON, size of the payload."""
EXTENT = struct.Struct("<QQQ")
"""Inode of the segment, offset in it, length; bytes."""
PAGE_BYTES = 4096
"""Unit of an object's ranges in segments."""
JSON_BYTES = 1 << 20
PAYLOAD_BYTES = 1 << 28
GREETING_BYTES = 1 << 12
"""Limit of JSON and payload together in a client's first frame."""
_MAGIC = b"DCPK"


def encode(fields: Mapping[str, Any], payload_bytes: int = 0, *, descriptor: bool = False) -> bytes:
    """Return head and JSON; the payload follows on the socket."""
    text = json.dumps(fields, separators=(",", ":")).encode()  # ASCII, so that any string survives
    if len(text) > JSON_BYTES or payload_bytes > PAYLOAD_BYTES:
        raise ValueError(f"a frame of {len(text):,} and {payload_bytes:,} bytes exceeds the limits of the protocol")
    return HEAD.pack(_MAGIC, VERSION, int(descriptor), len(text), payload_bytes) + text


def decode_head(data: bytes | bytearray | memoryview, limit_bytes: int | None = None) -> tuple[bool, int, int]:
    """Return whether a descriptor comes with a frame, and the sizes of its JSON and payload.

    Raises ValueError if this is not a head, or the sizes together exceed `limit_bytes`.
    """
    magic, version, descriptor, json_bytes, payload_bytes = HEAD.unpack(data)
    if magic != _MAGIC or version != VERSION or descriptor > 1:
        raise ValueError(f"not a frame of version {VERSION} of the protocol of keepers")
    if json_bytes > JSON_BYTES or payload_bytes > PAYLOAD_BYTES:
        raise ValueError("the frame exceeds the limits of the protocol")
    if limit_bytes is not None and json_bytes + payload_bytes > limit_bytes:
        raise ValueError("the first frame of a connection is small")
    return bool(descriptor), json_bytes, payload_bytes


def decode_json(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return a frame's fields; raise ValueError if this is not a JSON object."""
    try:
        fields = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise ValueError("the frame holds no JSON") from error
    if isinstance(fields, dict):
        return fields
    raise ValueError("the frame holds no JSON object")

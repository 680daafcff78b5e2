"""Public names for packages that implement transforms."""

from __future__ import annotations

from dcp_core.encoding.compression import (
    Extension,
    ExtensionRegistry,
    ItemStreams,
    StreamTransformExtension,
    undo,
)

__all__ = ["Extension", "ExtensionRegistry", "ItemStreams", "StreamTransformExtension", "undo"]

"""Public names of `dcp_core.encoding.transforms`, for packages that implement transforms."""

from __future__ import annotations

from dcp_core.encoding.transforms import Extension, ExtensionRegistry, StreamTransformExtension, transforms_of, undo

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "transforms_of", "undo"]

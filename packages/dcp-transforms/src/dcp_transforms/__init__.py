"""Transforms of stored bytes (compression): passed to storages as settings, found by readers through the index.

Not here: when an item is encoded, and where its bytes go. Each is imported when it is first asked for: looking for
plugins must not cost what encoding needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_transforms.block_zstd import BlockZStandard
    from dcp_transforms.float_planes import FloatPlanes
    from dcp_transforms.zstd import ZStandard

__all__ = ["BlockZStandard", "FloatPlanes", "ZStandard"]

_HOMES = {"BlockZStandard": "block_zstd", "FloatPlanes": "float_planes", "ZStandard": "zstd"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found

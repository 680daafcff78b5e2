"""Checkpoints in object stores: `ObjectStoreWriter`, `ObjectStoreReader`, and `open_store` for tools without torch.

Planning and coordination live in `dcp_core`, the life of a save in `dcp_io`, requests in obstore; this package joins
them. The reader and writer are imported when they are first asked for, since they need torch and the store does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_object.opening import open_store
from dcp_object.store import ObjectStore

if TYPE_CHECKING:
    from dcp_object.reader import ObjectStoreReader
    from dcp_object.writer import ObjectStoreWriter

__all__ = ["ObjectStore", "ObjectStoreReader", "ObjectStoreWriter", "open_store"]


def __getattr__(name: str) -> Any:
    if name == "ObjectStoreReader":
        from dcp_object.reader import ObjectStoreReader  # noqa: PLC0415 - needs torch

        return ObjectStoreReader
    if name == "ObjectStoreWriter":
        from dcp_object.writer import ObjectStoreWriter  # noqa: PLC0415 - needs torch

        return ObjectStoreWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Checkpoints in object stores: `ObjectStoreWriter`, `ObjectStoreReader`, and `open_store` for tools without torch.

Planning and coordination live in `dcp_core`, the life of a save in `dcp_io`, requests in obstore; this package joins
them. The reader and writer are imported when they are first asked for, since they need torch and the store does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
    from dcp_object.opening import open_store
    from dcp_object.reader import ObjectStoreReader
    from dcp_object.store import ObjectStore
    from dcp_object.writer import ObjectStoreWriter

__all__ = ["ObjectStore", "ObjectStoreReader", "ObjectStoreWriter", "open_store"]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_object.opening": ("open_store",),
        "dcp_object.reader": ("ObjectStoreReader",),
        "dcp_object.store": ("ObjectStore",),
        "dcp_object.writer": ("ObjectStoreWriter",),
    },
)

"""Checkpoints in object stores: `ObjectStoreWriter`, `ObjectStoreReader`, and `open_store` for tools without torch.

`dcp_core` plans and coordinates, `dcp_io` runs each save, and obstore sends the requests; this package connects them.
The reader and the writer need torch, unlike the store, so they are imported on first use.
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

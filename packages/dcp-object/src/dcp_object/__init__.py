"""Checkpoints in object stores: `ObjectStoreWriter`, `ObjectStoreReader`, and `open_store` for tools without torch.

The reader and the writer need torch, unlike the store, so they are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_object.storage import ObjectStoreReader as ObjectStoreReader
    from dcp_object.storage import ObjectStoreWriter as ObjectStoreWriter

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_object.storage": ("ObjectStoreReader", "ObjectStoreWriter"),
    },
)

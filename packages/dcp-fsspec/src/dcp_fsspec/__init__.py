"""Checkpoints in fsspec's file systems: `FsspecWriter`, `FsspecReader`, and `open_store` for tools without torch.

`dcp_core` plans and coordinates, `dcp_io` runs each save, and fsspec with its packages accesses the storage. The reader
and the writer need torch, unlike the store, so they are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
    from dcp_core.toolkit import SerializationFormat
    from dcp_fsspec.filesystem import FileSystem
    from dcp_fsspec.opening import open_store
    from dcp_fsspec.reader import FsspecReader
    from dcp_fsspec.store import FsspecStore
    from dcp_fsspec.writer import FsspecWriter

__all__ = ["FileSystem", "FsspecReader", "FsspecStore", "FsspecWriter", "SerializationFormat", "open_store"]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_fsspec.filesystem": ("FileSystem",),
        "dcp_core.toolkit": ("SerializationFormat",),
        "dcp_fsspec.opening": ("open_store",),
        "dcp_fsspec.reader": ("FsspecReader",),
        "dcp_fsspec.store": ("FsspecStore",),
        "dcp_fsspec.writer": ("FsspecWriter",),
    },
)

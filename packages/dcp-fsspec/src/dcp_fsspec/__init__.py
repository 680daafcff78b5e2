"""Checkpoints in fsspec's file systems: `FsspecWriter`, `FsspecReader`, and `open_store` for tools without torch.

The reader and the writer need torch, unlike the store, so they are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_fsspec.filesystem import FileSystem as FileSystem
    from dcp_fsspec.storage import FsspecReader as FsspecReader
    from dcp_fsspec.storage import FsspecWriter as FsspecWriter

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_fsspec.filesystem": ("FileSystem",),
        "dcp_fsspec.storage": ("FsspecReader", "FsspecWriter"),
    },
)

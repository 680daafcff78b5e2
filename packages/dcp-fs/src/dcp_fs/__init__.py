"""Checkpoints in local or mounted folders: `FileSystemWriter`, `FileSystemReader`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_core.storage.byte_storage import SerializationFormat as SerializationFormat
    from dcp_fs.filesystem import FileSystem as FileSystem
    from dcp_fs.filesystem import FileSystemBase as FileSystemBase
    from dcp_fs.storage import FileSystemReader as FileSystemReader
    from dcp_fs.storage import FileSystemWriter as FileSystemWriter
    from dcp_io import Layout as Layout
    from dcp_io import Verify as Verify

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_fs.filesystem": ("FileSystem", "FileSystemBase"),
        "dcp_core.storage.byte_storage": ("SerializationFormat",),
        "dcp_fs.storage": ("FileSystemReader", "FileSystemWriter"),
        "dcp_io": ("Layout", "Verify"),
    },
)

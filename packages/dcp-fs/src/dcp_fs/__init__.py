"""Checkpoints in local or mounted folders: `FileSystemWriter`, `FileSystemReader`.

Planning and coordination live in `dcp_core`, bytes and durability in `dcp_io`; this package joins them.
"""

from dcp_core.storage.serialization_format import SerializationFormat
from dcp_fs.filesystem import FileSystem, FileSystemBase
from dcp_fs.reader import FileSystemReader
from dcp_fs.writer import FileSystemWriter
from dcp_io import Layout, Verify

__all__ = [
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "Layout",
    "SerializationFormat",
    "Verify",
]

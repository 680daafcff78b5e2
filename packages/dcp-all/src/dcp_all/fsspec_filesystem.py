"""Mirror of `torch.distributed.checkpoint.fsspec_filesystem`, of torch 2.15 and newer: re-exports only."""

from dcp_all._extension import StreamTransformExtension
from dcp_all._fsspec_filesystem import FsspecReader, FsspecWriter
from dcp_all.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter, SerializationFormat

__all__ = [
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "FsspecReader",
    "FsspecWriter",
    "SerializationFormat",
    "StreamTransformExtension",
]

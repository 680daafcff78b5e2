"""Mirror of `torch.distributed.checkpoint._fsspec_filesystem`: re-exports only."""

from dcp_all._extension import StreamTransformExtension
from dcp_all.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter, SerializationFormat
from dcp_fsspec import FileSystem, FsspecReader, FsspecWriter

__all__ = [
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "FsspecReader",
    "FsspecWriter",
    "SerializationFormat",
    "StreamTransformExtension",
]

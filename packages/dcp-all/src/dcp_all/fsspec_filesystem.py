"""Mirror of `torch.distributed.checkpoint.fsspec_filesystem`, of torch 2.15 and newer: re-exports only."""

from dcp_all._extension import StreamTransformExtension as StreamTransformExtension
from dcp_all._fsspec_filesystem import FsspecReader as FsspecReader
from dcp_all._fsspec_filesystem import FsspecWriter as FsspecWriter
from dcp_all.filesystem import FileSystemBase as FileSystemBase
from dcp_all.filesystem import FileSystemReader as FileSystemReader
from dcp_all.filesystem import FileSystemWriter as FileSystemWriter
from dcp_all.filesystem import SerializationFormat as SerializationFormat

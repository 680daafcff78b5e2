"""Mirror of `torch.distributed.checkpoint._fsspec_filesystem`: re-exports only."""

from dcp_all._extension import StreamTransformExtension as StreamTransformExtension
from dcp_all.filesystem import FileSystemBase as FileSystemBase
from dcp_all.filesystem import FileSystemReader as FileSystemReader
from dcp_all.filesystem import FileSystemWriter as FileSystemWriter
from dcp_all.filesystem import SerializationFormat as SerializationFormat
from dcp_fsspec import FileSystem as FileSystem
from dcp_fsspec import FsspecReader as FsspecReader
from dcp_fsspec import FsspecWriter as FsspecWriter

"""Mirror of `torch.distributed.checkpoint.filesystem`: re-exports only."""

from dcp_core.global_plan import FORMAT_VERSION as CURRENT_DCP_VERSION
from dcp_core.metadata import StorageInfo
from dcp_core.metadata import StorageInfo as _StorageInfo
from dcp_fs import FileSystem, FileSystemBase, FileSystemReader, FileSystemWriter, SerializationFormat
from dcp_fs import FileSystemWriter as _FileSystemWriter
from dcp_manifest import DATA_SUFFIX as DEFAULT_SUFFIX
from dcp_manifest import METADATA_NAME as _metadata_fn  # noqa: N811 - stock's name

__all__ = [
    "CURRENT_DCP_VERSION",
    "DEFAULT_SUFFIX",
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "SerializationFormat",
    "StorageInfo",
    "_FileSystemWriter",
    "_StorageInfo",
    "_metadata_fn",
]

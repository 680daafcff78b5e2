"""Mirror of `torch.distributed.checkpoint.filesystem`: re-exports only."""

from dcp_all._extension import ExtensionRegistry, StreamTransformExtension
from dcp_all.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from dcp_all.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from dcp_all.staging import BlockingAsyncStager
from dcp_all.storage import StorageReader, StorageWriter, WriteResult
from dcp_core.records.metadata import StorageInfo
from dcp_core.records.metadata import StorageInfo as _StorageInfo
from dcp_fs import FileSystem, FileSystemBase, FileSystemReader, FileSystemWriter, SerializationFormat
from dcp_fs import FileSystemWriter as _FileSystemWriter
from dcp_manifest.folders.folder import DATA_SUFFIX as DEFAULT_SUFFIX
from dcp_manifest.folders.folder import METADATA_NAME as _metadata_fn  # noqa: N811 - stock's name
from dcp_manifest.stock.stock_write import STOCK_VERSION as CURRENT_DCP_VERSION

__all__ = [
    "CURRENT_DCP_VERSION",
    "DEFAULT_SUFFIX",
    "STATE_DICT_TYPE",
    "BlockingAsyncStager",
    "ExtensionRegistry",
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "SerializationFormat",
    "StorageInfo",
    "StorageMeta",
    "StorageReader",
    "StorageWriter",
    "StreamTransformExtension",
    "WriteItem",
    "WriteItemType",
    "WriteResult",
    "_FileSystemWriter",
    "_StorageInfo",
    "_metadata_fn",
]

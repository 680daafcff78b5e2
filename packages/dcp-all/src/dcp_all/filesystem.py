"""Mirror of `torch.distributed.checkpoint.filesystem`: re-exports only."""

from dcp_all._extension import ExtensionRegistry as ExtensionRegistry
from dcp_all._extension import StreamTransformExtension as StreamTransformExtension
from dcp_all.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from dcp_all.metadata import Metadata as Metadata
from dcp_all.metadata import StorageMeta as StorageMeta
from dcp_all.planner import LoadItemType as LoadItemType
from dcp_all.planner import LoadPlan as LoadPlan
from dcp_all.planner import LoadPlanner as LoadPlanner
from dcp_all.planner import ReadItem as ReadItem
from dcp_all.planner import SavePlan as SavePlan
from dcp_all.planner import SavePlanner as SavePlanner
from dcp_all.planner import WriteItem as WriteItem
from dcp_all.planner import WriteItemType as WriteItemType
from dcp_all.staging import BlockingAsyncStager as BlockingAsyncStager
from dcp_all.storage import StorageReader as StorageReader
from dcp_all.storage import StorageWriter as StorageWriter
from dcp_all.storage import WriteResult as WriteResult
from dcp_core.records.metadata import StorageInfo as StorageInfo
from dcp_fs import FileSystem as FileSystem
from dcp_fs import FileSystemBase as FileSystemBase
from dcp_fs import FileSystemReader as FileSystemReader
from dcp_fs import FileSystemWriter as FileSystemWriter
from dcp_fs import SerializationFormat as SerializationFormat
from dcp_manifest.folders.folder import DATA_SUFFIX, METADATA_NAME
from dcp_manifest.stock.stock_write import STOCK_VERSION

_StorageInfo = StorageInfo
_FileSystemWriter = FileSystemWriter
DEFAULT_SUFFIX = DATA_SUFFIX
_metadata_fn = METADATA_NAME
CURRENT_DCP_VERSION = STOCK_VERSION

"""Mirror of `torch.distributed.checkpoint.planner_helpers`: re-exports only."""

from dcp_all.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from dcp_all.metadata import BytesStorageMetadata as BytesStorageMetadata
from dcp_all.metadata import ChunkStorageMetadata as ChunkStorageMetadata
from dcp_all.metadata import MetadataIndex as MetadataIndex
from dcp_all.metadata import TensorProperties as TensorProperties
from dcp_all.metadata import TensorStorageMetadata as TensorStorageMetadata
from dcp_all.planner import LoadItemType as LoadItemType
from dcp_all.planner import ReadItem as ReadItem
from dcp_all.planner import SavePlan as SavePlan
from dcp_all.planner import TensorWriteData as TensorWriteData
from dcp_all.planner import WriteItem as WriteItem
from dcp_all.planner import WriteItemType as WriteItemType
from dcp_core.planning.load_planner import create_read_items
from dcp_core.planning.read_items import create_read_items_for_chunk_list as create_read_items_for_chunk_list
from dcp_core.planning.save_planner import create_write_items
from dcp_core.records.metadata import STORAGE_TYPES as STORAGE_TYPES
from dcp_core.shards.boxes import CheckpointableTensor as CheckpointableTensor

_create_read_items = create_read_items
_create_write_items = create_write_items

"""Mirror of `torch.distributed.checkpoint.planner_helpers`: re-exports only."""

from dcp_all.metadata import (
    STATE_DICT_TYPE,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_all.planner import LoadItemType, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from dcp_core.planning.load_planner import create_read_items as _create_read_items
from dcp_core.planning.read_items import create_read_items_for_chunk_list
from dcp_core.planning.save_planner import create_write_items as _create_write_items
from dcp_core.records.metadata import STORAGE_TYPES
from dcp_core.shards.boxes import CheckpointableTensor

__all__ = [
    "STATE_DICT_TYPE",
    "STORAGE_TYPES",
    "BytesStorageMetadata",
    "CheckpointableTensor",
    "ChunkStorageMetadata",
    "LoadItemType",
    "MetadataIndex",
    "ReadItem",
    "SavePlan",
    "TensorProperties",
    "TensorStorageMetadata",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
    "_create_read_items",
    "_create_write_items",
    "create_read_items_for_chunk_list",
]

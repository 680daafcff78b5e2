"""Mirror of `torch.distributed.checkpoint.planner`: re-exports only."""

from dcp_all.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from dcp_core.records.protocols import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

__all__ = [
    "STATE_DICT_TYPE",
    "BytesIOWriteData",
    "ChunkStorageMetadata",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StorageMeta",
    "TensorProperties",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]

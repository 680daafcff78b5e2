"""Mirror of `torch.distributed.checkpoint.optimizer`: re-exports only."""

from dcp_all._nested_dict import unflatten_state_dict
from dcp_all.default_planner import DefaultLoadPlanner
from dcp_all.metadata import (
    STATE_DICT_TYPE,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_all.planner import LoadPlan, LoadPlanner
from dcp_all.planner_helpers import create_read_items_for_chunk_list
from dcp_all.state_dict_loader import load_state_dict
from dcp_all.storage import StorageReader
from dcp_state.optimizer.optimizer_state_dict import load_sharded_optimizer_state_dict

__all__ = [
    "STATE_DICT_TYPE",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "StorageReader",
    "TensorProperties",
    "TensorStorageMetadata",
    "create_read_items_for_chunk_list",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "unflatten_state_dict",
]

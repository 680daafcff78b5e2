"""Mirror of `torch.distributed.checkpoint.default_planner`: re-exports only."""

from dcp_all._dedup_save_plans import dedup_save_plans
from dcp_all._nested_dict import flatten_state_dict
from dcp_all._traverse import set_element
from dcp_all.metadata import (
    STATE_DICT_TYPE,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from dcp_all.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType
from dcp_all.utils import find_state_dict_object
from dcp_core.planning.load_planner import (
    DefaultLoadPlanner,
    EmptyStateDictLoadPlanner,
    create_default_global_load_plan,
    create_default_local_load_plan,
)
from dcp_core.planning.load_planner import EmptyStateDictLoadPlanner as _EmptyStateDictLoadPlanner
from dcp_core.planning.save_planner import DefaultSavePlanner, create_default_local_save_plan
from dcp_core.planning.stock_global_plan import create_default_global_save_plan
from dcp_core.records.metadata import STORAGE_TYPES
from dcp_core.state_dict.flatten import FLATTEN_MAPPING

__all__ = [
    "FLATTEN_MAPPING",
    "STATE_DICT_TYPE",
    "STORAGE_TYPES",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "EmptyStateDictLoadPlanner",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StorageMeta",
    "TensorStorageMetadata",
    "WriteItem",
    "WriteItemType",
    "_EmptyStateDictLoadPlanner",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
    "dedup_save_plans",
    "find_state_dict_object",
    "flatten_state_dict",
    "set_element",
]

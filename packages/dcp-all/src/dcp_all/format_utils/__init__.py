"""Mirror of `torch.distributed.checkpoint.format_utils`: re-exports only, including private names that clients use."""

from dcp_all._nested_dict import flatten_state_dict
from dcp_all.default_planner import DefaultLoadPlanner
from dcp_all.filesystem import FileSystemReader, FileSystemWriter
from dcp_all.metadata import STATE_DICT_TYPE, Metadata, TensorProperties, TensorStorageMetadata
from dcp_all.planner import LoadItemType, LoadPlan, LoadPlanner
from dcp_all.storage import StorageReader
from dcp_core.loading import load_by_reader as _load_state_dict
from dcp_core.planning.load_planner import EmptyStateDictLoadPlanner as _EmptyStateDictLoadPlanner
from dcp_core.records.metadata import STORAGE_TYPES
from dcp_format.torch_save.broadcasting_reader import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from dcp_format.torch_save.stock_calls import dcp_to_torch_save, torch_save_to_dcp

__all__ = [
    "STATE_DICT_TYPE",
    "STORAGE_TYPES",
    "BroadcastingTorchSaveReader",
    "DefaultLoadPlanner",
    "DynamicMetaLoadPlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "StorageReader",
    "TensorProperties",
    "TensorStorageMetadata",
    "_EmptyStateDictLoadPlanner",
    "_load_state_dict",
    "dcp_to_torch_save",
    "flatten_state_dict",
    "torch_save_to_dcp",
]

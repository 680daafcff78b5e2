"""Mirror of `torch.distributed.checkpoint.format_utils`: re-exports only, including private names that clients use."""

from dcp_all._nested_dict import flatten_state_dict as flatten_state_dict
from dcp_all.default_planner import DefaultLoadPlanner as DefaultLoadPlanner
from dcp_all.filesystem import FileSystemReader as FileSystemReader
from dcp_all.filesystem import FileSystemWriter as FileSystemWriter
from dcp_all.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from dcp_all.metadata import Metadata as Metadata
from dcp_all.metadata import TensorProperties as TensorProperties
from dcp_all.metadata import TensorStorageMetadata as TensorStorageMetadata
from dcp_all.planner import LoadItemType as LoadItemType
from dcp_all.planner import LoadPlan as LoadPlan
from dcp_all.planner import LoadPlanner as LoadPlanner
from dcp_all.storage import StorageReader as StorageReader
from dcp_core.loading import load_by_reader
from dcp_core.planning.load_planner import EmptyStateDictLoadPlanner
from dcp_core.records.metadata import STORAGE_TYPES as STORAGE_TYPES
from dcp_format.torch_save.broadcasting_reader import BroadcastingTorchSaveReader as BroadcastingTorchSaveReader
from dcp_format.torch_save.broadcasting_reader import DynamicMetaLoadPlanner as DynamicMetaLoadPlanner
from dcp_format.torch_save.stock_calls import dcp_to_torch_save as dcp_to_torch_save
from dcp_format.torch_save.stock_calls import torch_save_to_dcp as torch_save_to_dcp

_load_state_dict = load_by_reader
_EmptyStateDictLoadPlanner = EmptyStateDictLoadPlanner

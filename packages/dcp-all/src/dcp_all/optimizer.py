"""Mirror of `torch.distributed.checkpoint.optimizer`: re-exports only."""

from dcp_all._nested_dict import unflatten_state_dict as unflatten_state_dict
from dcp_all.default_planner import DefaultLoadPlanner as DefaultLoadPlanner
from dcp_all.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from dcp_all.metadata import BytesStorageMetadata as BytesStorageMetadata
from dcp_all.metadata import ChunkStorageMetadata as ChunkStorageMetadata
from dcp_all.metadata import Metadata as Metadata
from dcp_all.metadata import MetadataIndex as MetadataIndex
from dcp_all.metadata import TensorProperties as TensorProperties
from dcp_all.metadata import TensorStorageMetadata as TensorStorageMetadata
from dcp_all.planner import LoadPlan as LoadPlan
from dcp_all.planner import LoadPlanner as LoadPlanner
from dcp_all.planner_helpers import create_read_items_for_chunk_list as create_read_items_for_chunk_list
from dcp_all.state_dict_loader import load_state_dict as load_state_dict
from dcp_all.storage import StorageReader as StorageReader
from dcp_state.optimizer.optimizer_state_dict import (
    load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict,
)

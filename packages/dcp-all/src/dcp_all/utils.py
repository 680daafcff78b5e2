"""Mirror of `torch.distributed.checkpoint.utils`: re-exports only."""

from dcp_all.api import CheckpointException
from dcp_all.metadata import STATE_DICT_TYPE, MetadataIndex
from dcp_core.shards.shards import find_state_dict_object, find_tensor_shard

__all__ = [
    "STATE_DICT_TYPE",
    "CheckpointException",
    "MetadataIndex",
    "find_state_dict_object",
    "find_tensor_shard",
]

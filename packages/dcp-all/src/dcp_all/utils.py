"""Mirror of `torch.distributed.checkpoint.utils`: re-exports only."""

from dcp_all.api import CheckpointException as CheckpointException
from dcp_all.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from dcp_all.metadata import MetadataIndex as MetadataIndex
from dcp_core.shards.shards import find_state_dict_object as find_state_dict_object
from dcp_core.shards.shards import find_tensor_shard as find_tensor_shard

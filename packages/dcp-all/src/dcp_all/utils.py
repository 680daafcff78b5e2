"""Mirror of `torch.distributed.checkpoint.utils`: re-exports only."""

from dcp_core.shards import find_state_dict_object, find_tensor_shard

__all__ = ["find_state_dict_object", "find_tensor_shard"]

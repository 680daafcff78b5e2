"""Mirror of `torch.distributed.checkpoint.optimizer`: re-exports only."""

from dcp_state.sharded_load import load_sharded_optimizer_state_dict

__all__ = ["load_sharded_optimizer_state_dict"]

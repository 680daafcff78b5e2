"""Mirror of `torch.distributed.checkpoint._nested_dict`: re-exports only."""

from dcp_core.flatten import flatten_state_dict, unflatten_state_dict

__all__ = ["flatten_state_dict", "unflatten_state_dict"]

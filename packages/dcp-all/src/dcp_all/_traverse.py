"""Mirror of `torch.distributed.checkpoint._traverse`: re-exports only."""

from dcp_core.flatten import get_element, set_element
from dcp_core.traverse import print_tensor, traverse_state_dict

__all__ = ["get_element", "print_tensor", "set_element", "traverse_state_dict"]

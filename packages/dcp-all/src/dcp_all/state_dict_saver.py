"""Mirror of `torch.distributed.checkpoint.state_dict_saver`: re-exports only."""

from dcp_core.saving import save, save_state_dict

__all__ = ["save", "save_state_dict"]

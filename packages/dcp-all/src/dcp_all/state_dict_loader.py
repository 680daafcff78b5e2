"""Mirror of `torch.distributed.checkpoint.state_dict_loader`: re-exports only."""

from dcp_core.loading import load, load_keys, load_state_dict
from dcp_core.loading import load_by_reader as _load_state_dict
from dcp_core.loading import load_keys as _load_state_dict_from_keys

__all__ = ["_load_state_dict", "_load_state_dict_from_keys", "load", "load_keys", "load_state_dict"]

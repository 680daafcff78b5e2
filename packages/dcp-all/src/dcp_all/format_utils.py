"""Mirror of `torch.distributed.checkpoint.format_utils`: re-exports only, private names that clients use included."""

from dcp_core.load_planner import EmptyStateDictLoadPlanner as _EmptyStateDictLoadPlanner
from dcp_core.loading import load_by_reader as _load_state_dict
from dcp_format.broadcasting_reader import BroadcastingTorchSaveReader
from dcp_format.dynamic_planner import DynamicMetaLoadPlanner
from dcp_format.torch_save import dcp_to_torch_save, torch_save_to_dcp

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "_EmptyStateDictLoadPlanner",
    "_load_state_dict",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
]

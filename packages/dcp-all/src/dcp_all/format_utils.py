"""Mirror of `torch.distributed.checkpoint.format_utils`: re-exports only."""

from dcp_format.broadcasting_reader import BroadcastingTorchSaveReader
from dcp_format.dynamic_planner import DynamicMetaLoadPlanner
from dcp_format.torch_save import dcp_to_torch_save, torch_save_to_dcp

__all__ = ["BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner", "dcp_to_torch_save", "torch_save_to_dcp"]

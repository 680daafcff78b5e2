"""Mirror of `torch.distributed.checkpoint._dedup_save_plans`: re-exports only."""

from dcp_all.planner import SavePlan, WriteItem
from dcp_core.planning.replicas import dedup_save_plans

__all__ = [
    "SavePlan",
    "WriteItem",
    "dedup_save_plans",
]

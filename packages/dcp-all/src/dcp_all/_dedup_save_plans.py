"""Mirror of `torch.distributed.checkpoint._dedup_save_plans`: re-exports only."""

from dcp_all.planner import SavePlan as SavePlan
from dcp_all.planner import WriteItem as WriteItem
from dcp_core.planning.replicas import dedup_save_plans as dedup_save_plans

"""Mirror of `torch.distributed.checkpoint.default_planner`: re-exports only."""

from dcp_core.global_plan import create_default_global_save_plan
from dcp_core.load_planner import (
    DefaultLoadPlanner,
    EmptyStateDictLoadPlanner,
    create_default_global_load_plan,
    create_default_local_load_plan,
)
from dcp_core.load_planner import EmptyStateDictLoadPlanner as _EmptyStateDictLoadPlanner
from dcp_core.save_planner import DefaultSavePlanner, create_default_local_save_plan

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "EmptyStateDictLoadPlanner",
    "_EmptyStateDictLoadPlanner",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
]

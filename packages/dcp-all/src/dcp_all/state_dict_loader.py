"""Mirror of `torch.distributed.checkpoint.state_dict_loader`: re-exports only."""

from dcp_all.default_planner import DefaultLoadPlanner
from dcp_all.planner import LoadPlan, LoadPlanner
from dcp_all.stateful import Stateful
from dcp_all.storage import StorageReader
from dcp_core.loading import load, load_keys, load_state_dict
from dcp_core.loading import load_by_reader as _load_state_dict
from dcp_core.loading import load_keys as _load_state_dict_from_keys

__all__ = [
    "DefaultLoadPlanner",
    "LoadPlan",
    "LoadPlanner",
    "Stateful",
    "StorageReader",
    "_load_state_dict",
    "_load_state_dict_from_keys",
    "load",
    "load_keys",
    "load_state_dict",
]

"""Mirror of `torch.distributed.checkpoint.state_dict_loader`: re-exports only."""

from dcp_all.default_planner import DefaultLoadPlanner as DefaultLoadPlanner
from dcp_all.planner import LoadPlan as LoadPlan
from dcp_all.planner import LoadPlanner as LoadPlanner
from dcp_all.stateful import Stateful as Stateful
from dcp_all.storage import StorageReader as StorageReader
from dcp_core.loading import load as load
from dcp_core.loading import load_by_reader
from dcp_core.loading import load_keys as load_keys
from dcp_core.loading import load_state_dict as load_state_dict

_load_state_dict = load_by_reader
_load_state_dict_from_keys = load_keys

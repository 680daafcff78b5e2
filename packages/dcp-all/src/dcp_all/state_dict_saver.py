"""Mirror of `torch.distributed.checkpoint.state_dict_saver`: re-exports only."""

from dcp_all.default_planner import DefaultSavePlanner as DefaultSavePlanner
from dcp_all.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from dcp_all.metadata import Metadata as Metadata
from dcp_all.planner import SavePlan as SavePlan
from dcp_all.planner import SavePlanner as SavePlanner
from dcp_all.staging import AsyncStager as AsyncStager
from dcp_all.staging import DefaultStager as DefaultStager
from dcp_all.staging import StagingOptions as StagingOptions
from dcp_all.stateful import Stateful as Stateful
from dcp_all.storage import StorageWriter as StorageWriter
from dcp_all.storage import WriteResult as WriteResult
from dcp_async.options import AsyncCheckpointerType as AsyncCheckpointerType
from dcp_async.queue.jobs import AsyncSaveResponse as AsyncSaveResponse
from dcp_async.saver import async_save as async_save
from dcp_core.saving import save as save
from dcp_core.saving import save_state_dict as save_state_dict

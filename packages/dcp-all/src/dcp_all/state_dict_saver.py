"""Mirror of `torch.distributed.checkpoint.state_dict_saver`: re-exports only."""

from dcp_all.default_planner import DefaultSavePlanner
from dcp_all.metadata import STATE_DICT_TYPE, Metadata
from dcp_all.planner import SavePlan, SavePlanner
from dcp_all.staging import AsyncStager, DefaultStager, StagingOptions
from dcp_all.stateful import Stateful
from dcp_all.storage import StorageWriter, WriteResult
from dcp_async.options import AsyncCheckpointerType
from dcp_async.queue.jobs import AsyncSaveResponse
from dcp_async.saver import async_save
from dcp_core.saving import save, save_state_dict

__all__ = [
    "STATE_DICT_TYPE",
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "AsyncStager",
    "DefaultSavePlanner",
    "DefaultStager",
    "Metadata",
    "SavePlan",
    "SavePlanner",
    "StagingOptions",
    "Stateful",
    "StorageWriter",
    "WriteResult",
    "async_save",
    "save",
    "save_state_dict",
]

"""Mirror of `torch.distributed.checkpoint.staging`: re-exports only."""

from dcp_all._state_dict_stager import StateDictStager
from dcp_all.metadata import STATE_DICT_TYPE
from dcp_async.staging.stagers import DefaultStager, StagingOptions
from dcp_core.tensors.staging import AsyncStager, BlockingAsyncStager

__all__ = [
    "STATE_DICT_TYPE",
    "AsyncStager",
    "BlockingAsyncStager",
    "DefaultStager",
    "StagingOptions",
    "StateDictStager",
]

"""Mirror of `torch.distributed.checkpoint.staging`: re-exports only."""

from dcp_all._state_dict_stager import StateDictStager as StateDictStager
from dcp_all.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from dcp_async.staging.stagers import DefaultStager as DefaultStager
from dcp_async.staging.stagers import StagingOptions as StagingOptions
from dcp_core.tensors.staging import AsyncStager as AsyncStager
from dcp_core.tensors.staging import BlockingAsyncStager as BlockingAsyncStager

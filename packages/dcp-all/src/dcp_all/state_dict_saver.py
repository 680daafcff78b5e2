"""Mirror of `torch.distributed.checkpoint.state_dict_saver`: re-exports only."""

from dcp_async.async_save import async_save
from dcp_async.jobs import AsyncSaveResponse
from dcp_async.options import AsyncCheckpointerType
from dcp_core.saving import save, save_state_dict

__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "async_save", "save", "save_state_dict"]

"""Mirror of `torch.distributed.checkpoint.staging`: re-exports only."""

from dcp_async.stagers import DefaultStager, StagingOptions
from dcp_core.staging import AsyncStager, BlockingAsyncStager

__all__ = ["AsyncStager", "BlockingAsyncStager", "DefaultStager", "StagingOptions"]

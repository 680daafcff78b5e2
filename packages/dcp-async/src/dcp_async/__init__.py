"""Asynchronous saving: stage the state dict in a reused host buffer, and save it from there in a thread or process.

What is saved, and how, is the affair of `dcp_core`; this package says when, from which memory and by whom.
"""

from dcp_async.async_save import async_save, close_savers, shared_saver
from dcp_async.errors import (
    MutatedWhileStagedError,
    NestedSaveError,
    SaverClosedError,
    SaverDeadlineError,
    SaveSkippedError,
    SaveSupersededError,
    StagingLimitError,
    StagingMismatchError,
    WorkerError,
    WorkerLostError,
)
from dcp_async.options import AsyncCheckpointerType, Overlap, SaverOptions, WorkerOptions
from dcp_async.queue.jobs import AsyncSaveResponse, SaveFuture
from dcp_async.saver import AsyncSaver
from dcp_async.staging.stagers import DefaultStager, StagingOptions, StateDictStager
from dcp_core.tensors.staging import AsyncStager, BlockingAsyncStager

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "AsyncSaver",
    "AsyncStager",
    "BlockingAsyncStager",
    "DefaultStager",
    "MutatedWhileStagedError",
    "NestedSaveError",
    "Overlap",
    "SaveFuture",
    "SaveSkippedError",
    "SaveSupersededError",
    "SaverClosedError",
    "SaverDeadlineError",
    "SaverOptions",
    "StagingLimitError",
    "StagingMismatchError",
    "StagingOptions",
    "StateDictStager",
    "WorkerError",
    "WorkerLostError",
    "WorkerOptions",
    "async_save",
    "close_savers",
    "shared_saver",
]

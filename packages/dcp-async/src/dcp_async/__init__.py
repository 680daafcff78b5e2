"""Asynchronous saving: copy the state dict to a reused host buffer, and save the copy in a thread or process.

`dcp_core` plans and writes a save; this package decides when and in which thread or process the save runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
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
    from dcp_async.shared_savers import async_save, close_savers, shared_saver
    from dcp_async.staging.stagers import DefaultStager, StagingOptions, StateDictStager
    from dcp_core import AsyncStager, BlockingAsyncStager

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

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_async.errors": (
            "MutatedWhileStagedError",
            "NestedSaveError",
            "SaverClosedError",
            "SaverDeadlineError",
            "SaveSkippedError",
            "SaveSupersededError",
            "StagingLimitError",
            "StagingMismatchError",
            "WorkerError",
            "WorkerLostError",
        ),
        "dcp_async.options": ("AsyncCheckpointerType", "Overlap", "SaverOptions", "WorkerOptions"),
        "dcp_async.queue.jobs": ("AsyncSaveResponse", "SaveFuture"),
        "dcp_async.saver": ("AsyncSaver",),
        "dcp_async.shared_savers": ("async_save", "close_savers", "shared_saver"),
        "dcp_async.staging.stagers": ("DefaultStager", "StagingOptions", "StateDictStager"),
        "dcp_core": ("AsyncStager", "BlockingAsyncStager"),
    },
)

"""Asynchronous saving: copy the state dict to a reused host buffer, and save the copy in a thread or process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_async.errors import (
        SaverClosedError,
        SaverDeadlineError,
        StagingMismatchError,
        WorkerError,
        WorkerLostError,
    )
    from dcp_async.options import AsyncCheckpointerType, SaverOptions, WorkerOptions
    from dcp_async.queue.jobs import AsyncSaveResponse
    from dcp_async.saver import AsyncSaver, async_save
    from dcp_async.staging.stagers import DefaultStager, StagingOptions, StateDictStager
    from dcp_core.errors import SaveSkippedError

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "AsyncSaver",
    "DefaultStager",
    "SaveSkippedError",
    "SaverClosedError",
    "SaverDeadlineError",
    "SaverOptions",
    "StagingMismatchError",
    "StagingOptions",
    "StateDictStager",
    "WorkerError",
    "WorkerLostError",
    "WorkerOptions",
    "async_save",
]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_async.errors": (
            "SaverClosedError",
            "SaverDeadlineError",
            "StagingMismatchError",
            "WorkerError",
            "WorkerLostError",
        ),
        "dcp_async.options": ("AsyncCheckpointerType", "SaverOptions", "WorkerOptions"),
        "dcp_async.queue.jobs": ("AsyncSaveResponse",),
        "dcp_async.saver": ("AsyncSaver", "async_save"),
        "dcp_async.staging.stagers": ("DefaultStager", "StagingOptions", "StateDictStager"),
        "dcp_core.errors": ("SaveSkippedError",),
    },
)

"""Asynchronous saving: copy the state dict to a reused host buffer, and save the copy in a thread or process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_async.errors import SaverClosedError as SaverClosedError
    from dcp_async.errors import SaverDeadlineError as SaverDeadlineError
    from dcp_async.errors import StagingMismatchError as StagingMismatchError
    from dcp_async.errors import WorkerError as WorkerError
    from dcp_async.errors import WorkerLostError as WorkerLostError
    from dcp_async.options import AsyncCheckpointerType as AsyncCheckpointerType
    from dcp_async.options import SaverOptions as SaverOptions
    from dcp_async.options import WorkerOptions as WorkerOptions
    from dcp_async.queue.jobs import AsyncSaveResponse as AsyncSaveResponse
    from dcp_async.saver import AsyncSaver as AsyncSaver
    from dcp_async.saver import async_save as async_save
    from dcp_async.staging.stagers import DefaultStager as DefaultStager
    from dcp_async.staging.stagers import StagingOptions as StagingOptions
    from dcp_async.staging.stagers import StateDictStager as StateDictStager
    from dcp_core.errors import SaveSkippedError as SaveSkippedError

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_async.errors": (
            *("SaverClosedError", "SaverDeadlineError", "StagingMismatchError", "WorkerError", "WorkerLostError"),
        ),
        "dcp_async.options": ("AsyncCheckpointerType", "SaverOptions", "WorkerOptions"),
        "dcp_async.queue.jobs": ("AsyncSaveResponse",),
        "dcp_async.saver": ("AsyncSaver", "async_save"),
        "dcp_async.staging.stagers": ("DefaultStager", "StagingOptions", "StateDictStager"),
        "dcp_core.errors": ("SaveSkippedError",),
    },
)

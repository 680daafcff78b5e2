"""`SaveJob`, the record of one asynchronous save, and `SaveFuture`, the future that the caller gets."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dcp_async.errors import SaverClosedError
from dcp_async.queue.rank_place import Ticket
from dcp_async.queue.save_agreement import GroupLink
from dcp_async.queue.trainer_environment import Surroundings
from dcp_async.staging.copy_state import Staged
from dcp_async.staging.wave_source import WaveSource
from dcp_core import Metadata, SavePlanner, StorageWriter
from dcp_core.toolkit import CheckpointId, adopt_save_planner, adopt_writer

__all__ = ["AsyncSaveResponse", "SaveFuture", "SaveJob"]


class SaveFuture(Future[Metadata]):
    """Future of an asynchronous save, whose result is the checkpoint's metadata.

    An error that the caller never retrieves from the future is raised by the saver's next `save` or `close`, or logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        self._owner = os.getpid()

    def result(self, timeout: float | None = None) -> Metadata:
        """Wait until the checkpoint is published, at most `timeout` seconds, and return its metadata.

        Raises:
            TimeoutError: The save has not ended within `timeout` seconds.
            Exception: The save failed with this error.
        """
        self._check_here()
        try:
            return super().result(timeout)
        finally:
            self.asked = self.asked or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended, at most `timeout` seconds, and return its error; None if it succeeded."""
        self._check_here()
        found = super().exception(timeout)
        self.asked = True
        return found

    def add_done_callback(self, fn: Callable[[Future[Metadata]], object]) -> None:
        """Call `fn` with this future once the save has ended; at once if it has ended already."""
        self.asked = True
        super().add_done_callback(fn)

    def _check_here(self) -> None:
        """Raise instead of waiting for ever: a forked child has no thread that could finish the save."""
        if self._owner != os.getpid() and self._state != "FINISHED":
            raise SaverClosedError(
                f"this save is the process {self._owner}'s, of which this one was forked: ask its future there"
            )

    def failure(self) -> BaseException | None:
        """Return the error of an ended save, None if it succeeded, without marking the error as retrieved."""
        return super().exception()


@dataclass
class AsyncSaveResponse:
    """Result of an asynchronous save with an asynchronous stager: two futures.

    `staging_completion` is done when the state dict has been copied and may be changed again; `upload_completion` is
    done when the checkpoint is published. As in stock, the attributes can be reassigned, and a subclass may set them in
    its own `__init__`.

    Source: torch 2.13 `torch.distributed.checkpoint.state_dict_saver.AsyncSaveResponse`.
    """

    staging_completion: Future[None]
    upload_completion: Future[Metadata]


@dataclass(slots=True, eq=False)
class SaveJob:
    """Record of one asynchronous save, from the call of `save` to the end of the save.

    Attributes:
        link: Link to the other ranks that take part.
        ticket: Sequence number of the save.
        checkpoint_id: Checkpoint id of the save; None for the storage writer's own id.
        storage_writer: Storage writer that the caller passed; None for the one that the checkpoint id selects.
        planner: Save planner that the caller passed; None for a `DefaultSavePlanner`.
        use_collectives: Whether ranks plan together; with False, every rank plans alone.
        future: Future that the caller gets.
        staged: Copy of the state dict in the saver's memory.
        may_be_superseded: Whether a later save may replace this save while it is queued.
    """

    link: GroupLink
    ticket: Ticket
    checkpoint_id: CheckpointId | None
    storage_writer: StorageWriter | None
    planner: SavePlanner | None
    use_collectives: bool
    future: SaveFuture = field(default_factory=SaveFuture)
    staged: Staged | None = None
    staged_state: dict[str, Any] | None = None
    """State dict that the caller's own stager returned; `staged` is used otherwise."""
    planned: Any = None
    """Local plan of a custom planner, made in the trainer for a worker process; None with `DefaultSavePlanner`."""
    staging: Future[None] = field(default_factory=Future)
    """Future that is done when the state dict has been copied and may be changed again."""
    copied: Future[None] = field(default_factory=Future)
    """Future that is done when the save may begin: before `staging` if a part of the copy is made in waves."""
    waves: WaveSource | None = None
    """Source of what is copied in waves, before `save` returns."""
    copy_begun: float = 0.0
    """Time of `time.monotonic()` in seconds at which the copy began."""
    waited_seconds: float = 0.0
    """Time in seconds in which the rest was copied in waves, at the rate of the storage."""
    surroundings: Surroundings = field(default_factory=Surroundings.now)
    """Working directory and environment variables of the trainer when `save` was called."""
    group_store: object = None
    """The process group's store. This reference keeps its server running after `destroy_process_group`."""
    may_be_superseded: bool = False
    done: list[Callable[[], object]] = field(default_factory=list)
    """Functions that `release` calls after the save, such as those that free the copy's memory."""

    def __post_init__(self) -> None:
        # A save cannot be stopped by its caller, so neither future can be cancelled (`asyncio.wrap_future` tries).
        self.future.set_running_or_notify_cancel()
        self.staging.set_running_or_notify_cancel()
        self.copied.set_running_or_notify_cancel()
        # Without this object, whose memory for the copy must be free when the save ends, whoever has the futures.
        self.staging.add_done_callback(partial(_note_copied, self.copied))

    def adopt(self) -> None:
        """Adapt a storage writer and planner of another library, such as stock, through a bridge, a plug-in.

        Raises:
            PluginNotFoundError: No installed plug-in has a bridge for that library.
        """
        self.storage_writer = adopt_writer(self.storage_writer)
        self.planner = adopt_save_planner(self.planner)

    def release(self) -> None:
        """Call the functions in `done` as soon as staging has ended. Called at the end of the save."""
        self.staging.add_done_callback(lambda _: self._call_done())

    def _call_done(self) -> None:
        self.group_store = None
        while self.done:
            self.done.pop()()


def _note_copied(copied: Future[None], staging: Future[None]) -> None:
    if not copied.done():
        error = staging.exception()
        if error is None:
            copied.set_result(None)
        else:
            copied.set_exception(error)

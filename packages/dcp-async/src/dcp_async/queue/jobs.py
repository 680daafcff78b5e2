"""The record of one queued save, and the future that its caller holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dcp_async.errors import SaverClosedError
from dcp_async.queue.rank_place import Ticket
from dcp_async.queue.save_agreement import GroupLink
from dcp_async.queue.trainer_environment import Surroundings
from dcp_async.staging.copy_state import Staged
from dcp_core import Metadata, SavePlanner, StorageWriter
from dcp_core.toolkit import CheckpointId, adopt_save_planner, adopt_writer

__all__ = ["AsyncSaveResponse", "SaveFuture", "SaveJob"]


class SaveFuture(Future[Metadata]):
    """The future of a save's metadata. Remembers whether its result or error was ever retrieved."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        self._owner = os.getpid()

    def result(self, timeout: float | None = None) -> Metadata:
        """Return the checkpoint's metadata once it is published; raises the save's error."""
        self._check_here()
        try:
            return super().result(timeout)
        finally:
            self.asked = self.asked or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the save's error; None if the checkpoint was published."""
        self._check_here()
        found = super().exception(timeout)
        self.asked = True
        return found

    def add_done_callback(self, fn: Callable[[Future[Metadata]], object]) -> None:
        """Call `fn` with this future when the save has ended."""
        self.asked = True
        super().add_done_callback(fn)

    def _check_here(self) -> None:
        """Raise instead of waiting for ever: a forked child has no thread that could finish the save."""
        if self._owner != os.getpid() and self._state != "FINISHED":
            raise SaverClosedError(
                f"this save is the process {self._owner}'s, of which this one was forked: ask its future there"
            )

    def failure(self) -> BaseException | None:
        """Return the error of a save that has ended, without marking it as retrieved."""
        return super().exception()


@dataclass
class AsyncSaveResponse:
    """Two futures: one for staging (values may change again), one for the published checkpoint.

    As in stock, its attributes can be changed, and subclasses may set both futures in their own `__init__`.

    Source: torch 2.13 `torch.distributed.checkpoint.state_dict_saver.AsyncSaveResponse`.
    """

    staging_completion: Future[None]
    upload_completion: Future[Metadata]


@dataclass(slots=True, eq=False)
class SaveJob:
    """A queued save, from its call to its end."""

    link: GroupLink
    ticket: Ticket
    checkpoint_id: CheckpointId | None
    storage_writer: StorageWriter | None
    planner: SavePlanner | None
    use_collectives: bool
    future: SaveFuture = field(default_factory=SaveFuture)
    staged: Staged | None = None
    staged_state: dict[str, Any] | None = None
    """Result of the caller's own stager, instead of `staged`."""
    planned: Any = None
    """Plan of the caller's own planner, if that planner runs in the trainer."""
    staging: Future[None] = field(default_factory=Future)
    """Future that is done when the values may change again."""
    surroundings: Surroundings = field(default_factory=Surroundings.now)
    """Working directory and environment at the start of the save."""
    group_store: object = None
    """The process group's store. This reference keeps its server running after `destroy_process_group`."""
    may_be_superseded: bool = False
    done: list[Callable[[], object]] = field(default_factory=list)
    """Callbacks that are run when the save has ended."""

    def __post_init__(self) -> None:
        # A save cannot be stopped by its caller, so neither future can be cancelled (`asyncio.wrap_future` tries).
        self.future.set_running_or_notify_cancel()
        self.staging.set_running_or_notify_cancel()

    def adopt(self) -> None:
        """Adapt another library's storage and planner by an installed bridge plugin. Raises if there is none."""
        self.storage_writer = adopt_writer(self.storage_writer)
        self.planner = adopt_save_planner(self.planner)

    def release(self) -> None:
        """Run the release callbacks, once nothing uses the copy any more."""
        self.staging.add_done_callback(lambda _: self._call_done())

    def _call_done(self) -> None:
        self.group_store = None
        while self.done:
            self.done.pop()()

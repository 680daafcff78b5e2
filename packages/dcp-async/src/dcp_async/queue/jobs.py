"""Records of one asynchronous save: `SaveJob`, and `SaveFuture` for the caller."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dcp_async.errors import SaverClosedError
from dcp_async.queue.save_agreement import GroupLink, Ticket
from dcp_async.staging.copy_state import Staged
from dcp_async.staging.waves import WaveSource
from dcp_core import Metadata, SavePlanner, StorageWriter
from dcp_core.records.protocols import CheckpointId


class SaveFuture(Future[Metadata]):
    """Future of an asynchronous save; its result is the checkpoint's metadata.

    If the caller never retrieves an error, the saver's next `save` or `close` raises it, or it is logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        self._owner = os.getpid()

    def result(self, timeout: float | None = None) -> Metadata:
        """Return the metadata once the checkpoint is published; raise the save's error, or TimeoutError."""
        self._check_here()
        try:
            return super().result(timeout)
        finally:
            self.asked = self.asked or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, or None, once the save has ended; raise TimeoutError."""
        self._check_here()
        found = super().exception(timeout)
        self.asked = True
        return found

    def add_done_callback(self, fn: Callable[[Future[Metadata]], object]) -> None:
        """Call `fn` with this future once the save has ended."""
        self.asked = True
        super().add_done_callback(fn)

    def _check_here(self) -> None:
        """Raise in a forked child, which lacks the saving thread."""
        if self._owner != os.getpid() and self._state != "FINISHED":
            raise SaverClosedError(
                f"this save is the process {self._owner}'s, of which this one was forked: ask its future there"
            )

    def failure(self) -> BaseException | None:
        """Return the error of an ended save without marking it as retrieved."""
        return super().exception()


@dataclass
class AsyncSaveResponse:
    """Result of an asynchronous save with an asynchronous stager: two futures.

    `staging_completion` is done when the state dict has been copied and may be changed again; `upload_completion` is
    done when the checkpoint is published. As in stock, both attributes can be reassigned.

    Source: torch 2.13 `torch.distributed.checkpoint.state_dict_saver.AsyncSaveResponse`.
    """

    staging_completion: Future[None]
    upload_completion: Future[Metadata]


@dataclass(frozen=True, slots=True)
class SurroundingsChange:
    """Changes between two saves."""

    folder: str | None
    """New working directory; None if it is unchanged or no longer exists."""
    variables: dict[str, str | None]
    """Name → new value, or None if it was removed."""

    def apply(self) -> None:
        """Change this process; ignore a missing directory."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(self.folder)
        for name, value in self.variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Working directory and environment variables of a process."""

    folder: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Surroundings:
        """Record the surroundings of this process."""
        try:
            folder = os.getcwd()
        except FileNotFoundError:  # it has been removed
            folder = None
        return cls(folder, dict(os.environ))

    def since(self, before: Surroundings) -> SurroundingsChange | None:
        """Return the changes since an earlier record, if any."""
        folder = None if self.folder == before.folder else self.folder
        variables: dict[str, str | None] = {
            name: value for name, value in self.environment.items() if before.environment.get(name) != value
        }
        variables |= dict.fromkeys(before.environment.keys() - self.environment.keys())
        return SurroundingsChange(folder, variables) if variables or folder is not None else None


@dataclass(slots=True, eq=False)
class SaveJob:
    """One asynchronous save, from the call of `save` to its end."""

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
    """Local plan of a custom planner, for a worker."""
    staging: Future[None] = field(default_factory=Future)
    """Done when the state dict has been copied and may change."""
    copied: Future[None] = field(default_factory=Future)
    """Done when the save may begin: before `staging` if there are waves."""
    waves: WaveSource | None = None
    copy_begun: float = 0.0
    waited_seconds: float = 0.0
    """Duration of copying in waves."""
    surroundings: Surroundings = field(default_factory=Surroundings.now)
    group_store: object = None
    """Keeps the store's server running after `destroy_process_group`."""
    may_be_superseded: bool = False
    done: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A caller cannot stop a save, so its futures cannot be cancelled (`asyncio.wrap_future` tries).
        self.future.set_running_or_notify_cancel()
        self.staging.set_running_or_notify_cancel()
        self.copied.set_running_or_notify_cancel()
        # The callback must not reference this job: callers keep the futures, and the copy's memory must be freed.
        self.staging.add_done_callback(partial(_note_copied, self.copied))

    def release(self) -> None:
        """Call the functions in `done` once staging has ended."""
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

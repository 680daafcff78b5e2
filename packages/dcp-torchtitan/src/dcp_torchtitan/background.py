"""Background saver for torchtitan's asynchronous modes; training waits for the copy before the next optimizer step."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from typing import Any

from dcp_async import AsyncSaver, DefaultStager, StagingOptions
from dcp_manager import future_of

__all__ = ["BackgroundSaver"]

_PINNED = "async_with_pinned_mem"


class BackgroundSaver:
    """Saver for `dcp_manager` that saves in a thread (`async`) or in a process of its own (`async_with_pinned_mem`).

    In the second mode, the state is copied while the next step computes: call `wait_for_copy` before parameters change.
    """

    def __init__(self, mode: str, resources: contextlib.ExitStack) -> None:
        """Make the saver for a mode; closing `resources` closes it."""
        self._stager: DefaultStager | None = None
        if mode == _PINNED:
            self._stager = DefaultStager(StagingOptions(use_async_staging=True))
            resources.callback(self._stager.close)
        self._saver = resources.enter_context(AsyncSaver("process" if mode == _PINNED else "thread"))
        self._copy: Future[Any] | None = None
        self.last: Future[Any] | None = None
        """Future of the last save, done when its checkpoint exists."""

    def save(self, state_dict: dict[str, Any], **arguments: Any) -> Any:
        """Begin a save; see `AsyncSaver.save`."""
        answer: Any = self._saver.save(state_dict, async_stager=self._stager, **arguments)
        self._copy = getattr(answer, "staging_completion", None)
        self.last = future_of(answer)
        return answer

    def wait_for_copy(self) -> None:
        """Wait until the copy is complete, so that values may change. Raises the error of the copy."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.result()

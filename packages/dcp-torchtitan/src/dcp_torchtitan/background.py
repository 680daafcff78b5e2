"""Saver in the background for torchtitan's asynchronous modes, which waits for copies before the optimizer's step."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from typing import Any

from dcp_async import AsyncSaver, DefaultStager, StagingOptions

__all__ = ["BackgroundSaver"]

_PINNED = "async_with_pinned_mem"


class BackgroundSaver:
    """Saver that `dcp_manager` uses: in a thread (`async`), or in a process of its own (`async_with_pinned_mem`).

    In the second mode a copy goes on while the next step computes: `wait_for_copy` comes before parameters change.
    """

    def __init__(self, mode: str, resources: contextlib.ExitStack) -> None:
        """Make the saver; `resources` closes it."""
        self._stager: DefaultStager | None = None
        if mode == _PINNED:
            self._stager = DefaultStager(StagingOptions(use_async_staging=True))
            resources.callback(self._stager.close)
        self._saver = resources.enter_context(AsyncSaver("process" if mode == _PINNED else "thread"))
        self._copy: Future[Any] | None = None
        self.last: Future[Any] | None = None
        """Of the last save: done when its checkpoint exists."""

    def save(self, state_dict: dict[str, Any], **arguments: Any) -> Any:
        """Begin a save; see `AsyncSaver.save`."""
        answer: Any = self._saver.save(state_dict, async_stager=self._stager, **arguments)
        self._copy = getattr(answer, "staging_completion", None)
        self.last = getattr(answer, "upload_completion", answer)
        return answer

    def wait_for_copy(self) -> None:
        """Wait until values may change. Raises the error of the copy."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.result()

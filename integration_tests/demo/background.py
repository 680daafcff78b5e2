"""The saves of the training job: in a process of their own, while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import dcp_all as dcp
from integration_tests.demo.fingerprint import fingerprints
from integration_tests.demo.train_state import TrainState

__all__ = ["BackgroundSaves"]

STEPS_BESIDE = 2


class BackgroundSaves:
    """A process saver that reports what it does; a context manager that ends when the last checkpoint exists.

    Args:
        say: reports an event.
        checkpoint: where to save; each save replaces the one before.
        warm: start the process before training, not with the first save.
    """

    def __init__(self, say: Callable[..., None], checkpoint: Path, *, warm: bool) -> None:
        self._say = say
        self._warm = warm
        self._checkpoint = checkpoint
        self._saver = dcp.AsyncSaver(dcp.AsyncCheckpointerType.PROCESS)
        self._running: tuple[Future[dcp.Metadata], dict[str, Any]] | None = None

    def start(self, state: TrainState) -> None:
        """Copy the state and save the copy; training may go on at once.

        Ranks: every rank; collective, for the fingerprints that the demo compares.
        """
        self._say("saving", steps_done=state.steps_done)
        start = time.perf_counter()
        future = self._saver.save({"train": state}, checkpoint_id=self._checkpoint)
        blocked = time.perf_counter() - start
        prints = fingerprints(state.state_dict())
        facts = {"steps_done": state.steps_done, "seconds": blocked, "fingerprints": prints}
        if isinstance(future, Future):
            self._running = future, facts

    def look(self, steps_done: int) -> None:
        """Report a save that is done; wait for one that has run beside some steps already."""
        if self._running is not None:
            future, facts = self._running
            if future.done() or steps_done >= facts["steps_done"] + STEPS_BESIDE:
                self._report()

    def __enter__(self) -> BackgroundSaves:
        if self._warm:
            self._saver.warm_up()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._report()
            self._saver.close()
        else:
            self._saver.end()  # the error of training matters; the other ranks' savers hear that this one has ended

    def _report(self) -> None:
        if self._running is not None:
            future, facts = self._running
            self._running = None
            future.result()
            self._say("saved", **facts)

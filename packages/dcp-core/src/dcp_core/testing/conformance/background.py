"""Threads that repeat functions, such as loads, during a test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

__all__ = ["Background"]


class Background:
    """Repeats each action in a thread; an error stops all, and is raised at the end."""

    def __init__(self, *actions: Callable[[], None]) -> None:
        self._done = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._repeat, args=(action,)) for action in actions]

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and not self._done.is_set() and time.monotonic() < deadline:
            time.sleep(0.001)

    def __enter__(self) -> Background:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()
        if self._errors and error is None:
            raise self._errors[0]

    def _repeat(self, action: Callable[[], None]) -> None:
        try:
            while not self._done.is_set():
                action()
        except BaseException as error:  # noqa: BLE001 - raised at the end of the block, in the test's thread
            self._errors.append(error)
            self._done.set()

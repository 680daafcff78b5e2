"""Shows how far the demo is: a progress bar on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["Screen", "Stage"]


class Stage:
    """One line of the display."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def show(self, event: dict[str, Any]) -> None:
        """Let an event of rank 0 be seen."""
        kind = event["event"]
        if kind == "step":
            self._progress.advance(self._task)
        note = {"step": "", "saving": "saving …", "restored": "restored", "failed": "failed"}.get(kind)
        if kind == "step" and "loss" in event:
            note = f"loss {event['loss']:.3f}"
        if note is not None:
            self._progress.update(self._task, note=note)


class Screen:
    """The display of all stages; a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description:<44}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Stage]:
        """Show a stage of `total` steps while the body runs."""
        start = time.monotonic()
        task = self._progress.add_task(name, total=total, note="starting …")
        yield Stage(self._progress, task)
        self._progress.stop_task(task)
        if not self.console.is_terminal:
            self.console.print(f"{name:<44} {time.monotonic() - start:5.1f} s")

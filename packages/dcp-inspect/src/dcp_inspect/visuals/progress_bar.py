"""Progress bar of a long operation, in terminals and notebooks.

It needs no thread, hidden cursor or changed streams: a killed process leaves the terminal intact.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from dcp_base import CheckpointEvent
from dcp_base.registry import find_screen

AFTER_SECONDS = 1.5
PAUSE_SECONDS = 0.5
"""Least time between two drawings, which take milliseconds."""
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_VERBS = {
    "save": "saving",
    "load": "loading",
    "verify": "verifying",
    "convert": "converting to",
    "compare": "comparing",
    "list": "listing",
}
_ERASE = "\r\x1b[2K"
_NAME_LETTERS = 24

T = TypeVar("T")


class _Screen(Protocol):
    def width(self) -> int:
        """Return the number of columns."""

    def draw(self, line: Callable[[Any], object]) -> None:
        """Replace the display by what `line` prints."""

    def clear(self) -> None:
        """Remove what is shown."""


class _Bar:
    def __init__(self, event: CheckpointEvent, screen: _Screen) -> None:
        self.operation_id = event.operation_id
        self._title = _title(event)
        self._screen = screen
        self._next = time.monotonic() + AFTER_SECONDS
        self._progress: Any = None
        self._phase = ""

    def update(self, event: CheckpointEvent) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PAUSE_SECONDS
        from rich.progress import Progress  # noqa: PLC0415 - only when a bar is shown

        if self._progress is None or event.phase != self._phase:
            self._phase = event.phase
            columns = progress_columns(self._screen.width(), counts_bytes=event.operation != "list")
            self._progress = Progress(*columns, auto_refresh=False)
            self._progress.add_task(self._title, total=None)
        (task,) = self._progress.task_ids
        self._progress.update(task, total=event.expected_bytes, completed=event.bytes)
        self._screen.draw(lambda console: console.print(self._progress.get_renderable()))

    def end(self) -> None:
        if self._progress is not None:
            self._screen.clear()


class _Terminal:
    def __init__(self) -> None:
        self._console: Any = None

    def width(self) -> int:
        if self._console is None:
            from rich.console import Console  # noqa: PLC0415 - only when a bar is shown

            self._console = Console(stderr=True)
        width: int = self._console.width
        return width - 1

    def draw(self, line: Callable[[Any], object]) -> None:
        self.width()
        with self._console.capture() as drawn:
            line(self._console)
        sys.stderr.write(_ERASE + drawn.get().partition("\n")[0])
        sys.stderr.flush()

    def clear(self) -> None:
        sys.stderr.write(_ERASE)
        sys.stderr.flush()


class _Notebook:
    def __init__(self) -> None:
        self._handle: Any = None

    def width(self) -> int:
        return 100

    def draw(self, line: Callable[[Any], object]) -> None:
        from rich.console import Console  # noqa: PLC0415

        console = Console(file=io.StringIO(), record=True, force_jupyter=False, width=self.width())
        line(console)
        text = console.export_text(clear=False)
        self._show(console.export_html(inline_styles=True, code_format="<pre>{code}</pre>"), text)

    def clear(self) -> None:
        self._show("", "")

    def _show(self, html: str, text: str) -> None:
        data = {"text/html": html, "text/plain": text}
        if self._handle is None:
            display = importlib.import_module("IPython.display").display  # which a notebook has
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class _State:
    enabled = True
    bar: _Bar | None = None


_state = _State()


def show_progress(enabled: bool = True) -> None:
    """Switch the progress bars of this process on or off; they are on unless `DCP_PROGRESS=0` is set.

    Rank 0 shows a bar when its main thread waits longer than 1.5 s, so not for background saves. Bars appear in
    terminals (on stderr) and notebooks, never in pipes and logs.

    Ranks: affects this rank only.

    Example:
        ```python
        from dcp_inspect import show_progress

        show_progress(False)
        ```
    """
    _state.enabled = enabled


def observe(event: CheckpointEvent) -> None:
    """Show, move or remove the bar of an operation."""
    bar = _state.bar
    if bar is None:
        if event.state == "started" and event.phase == "total" and _is_waited_for(event):
            screen = _screen()
            _state.bar = None if screen is None else _Bar(event, screen)
    elif event.operation_id != bar.operation_id:
        return
    elif event.state == "progress":
        try:
            bar.update(event)
        except BaseException:  # a terminal that is gone: the caller of observers reports it once
            _state.bar = None
            raise
    elif event.phase == "total" and event.state != "started":
        _state.bar = None
        bar.end()


def _is_waited_for(event: CheckpointEvent) -> bool:
    """Whether the operation runs in the main thread of rank 0."""
    first = event.rank == 0 and all(os.environ.get(name, "0") == "0" for name in _RANKS)
    return first and event.operation in _VERBS and threading.current_thread() is threading.main_thread()


def _screen() -> _Screen | None:
    screen = find_screen() if _state.enabled else None
    if screen is None:
        return None
    return _Notebook() if screen == "notebook" else _Terminal()


def _title(event: CheckpointEvent) -> str:
    name = os.path.basename((event.checkpoint_id or "").rstrip("/"))
    name = "".join(letter if letter.isprintable() else "�" for letter in name)
    if len(name) > _NAME_LETTERS:
        name = f"{name[: _NAME_LETTERS - 1]}…"
    others = f" (rank 0 of {event.world_size})" if (event.world_size or 1) > 1 else ""
    return f"{_VERBS[event.operation]} {name}{others}"


def count_listed(items: Sequence[T], place: str) -> Iterator[T]:
    """Yield the items with a bar; it sends no events."""
    event = CheckpointEvent("list", "total", "started", 0, place, operation_id="list")
    observe(event)
    try:
        for number, item in enumerate(items):
            observe(replace(event, state="progress", bytes=number, expected_bytes=len(items)))
            yield item
    finally:
        observe(replace(event, state="finished"))


def progress_columns(width: int, *, counts_bytes: bool = True) -> list[Any]:
    """Return the columns of a bar for a screen."""
    from rich.filesize import pick_unit_and_suffix  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415 - only when a bar is shown
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text  # noqa: PLC0415

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.speed or 0.0
            unit, name = pick_unit_and_suffix(int(speed), ["B", "KiB", "MiB", "GiB", "TiB"], 1024)
            rate = "?" if task.speed is None else f"{speed / unit:.1f} {name}/s"
            return Text(rate, style="progress.data.speed")

    return [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=max(4, min(40, width - 80))),
        *((DownloadColumn(binary_units=True), RateColumn()) if counts_bytes else (MofNCompleteColumn(),)),
        TimeRemainingColumn(elapsed_when_finished=False),
    ]

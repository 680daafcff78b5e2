"""Progress bar of a long save, load, verification, conversion or comparison, in terminals and notebooks.

Drawn when progress events come, in one line on stderr: no thread runs for it, and neither the cursor nor the streams of
the program are changed, so that a killed process leaves the terminal as it should be.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from dcp_hooks import CheckpointEvent

__all__ = ["AFTER_SECONDS", "PAUSE_SECONDS", "observe", "progress_columns", "show_progress"]

AFTER_SECONDS = 1.5
"""Age of an operation from which its progress is shown."""
PAUSE_SECONDS = 0.5
"""Least time between two drawings of a bar, each of which takes milliseconds."""
_OFF = ("0", "off", "no", "false")
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_VERBS = {
    "save": "saving",
    "load": "loading",
    "verify": "verifying",
    "convert": "converting to",
    "compare": "comparing",
}
_ERASE = "\r\x1b[2K"
_NAME_LETTERS = 24


class _Screen(Protocol):
    """What a bar is drawn on."""

    def width(self) -> int:
        """Return the number of columns."""

    def draw(self, line: Callable[[Any], object]) -> None:
        """Show what `line` prints to a console, instead of what was shown before."""

    def clear(self) -> None:
        """Remove what is shown."""


class _Bar:
    """The bar of one operation.

    Args:
        event: Event of its start.
        screen: What it is drawn on.
    """

    def __init__(self, event: CheckpointEvent, screen: _Screen) -> None:
        self.operation_id = event.operation_id
        self._title = _title(event)
        self._screen = screen
        self._next = time.monotonic() + AFTER_SECONDS
        self._progress: Any = None
        self._phase = ""

    def update(self, event: CheckpointEvent) -> None:
        """Draw progress, if it is time to."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PAUSE_SECONDS
        from rich.progress import Progress  # noqa: PLC0415 - only when a bar is shown

        if self._progress is None or event.phase != self._phase:
            self._phase = event.phase
            self._progress = Progress(*progress_columns(self._screen.width()), auto_refresh=False)
            self._progress.add_task(self._title, total=None)
        (task,) = self._progress.task_ids
        self._progress.update(task, total=event.expected_bytes, completed=event.bytes)
        self._screen.draw(lambda console: console.print(self._progress.get_renderable()))

    def end(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._screen.clear()


class _Terminal:
    """A line of the terminal on stderr."""

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
    """The output of a notebook's cell."""

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
    """What this process shows."""

    enabled = True
    bar: _Bar | None = None


_state = _State()


def show_progress(enabled: bool = True) -> None:
    """Switch the progress bars of this process on or off; they are on unless `DCP_PROGRESS=0` is set.

    A bar is shown for what takes longer than 1.5 s and is waited for in the main thread: not for saves in the
    background. It is shown by rank 0 alone, in terminals (on stderr) and notebooks, never in pipes and logs.

    Args:
        enabled: Whether to show bars from now on.

    Ranks: affects this rank only.

    Example:
        ```python
        from dcp_inspect import show_progress

        show_progress(False)
        ```
    """
    _state.enabled = enabled


def observe(event: CheckpointEvent) -> None:
    """Show, move or remove the bar of the operation that an event belongs to."""
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
        except BaseException:  # a terminal that is gone: said once, by those who call observers
            _state.bar = None
            raise
    elif event.phase == "total" and event.state != "started":
        _state.bar = None
        bar.end()


def _is_waited_for(event: CheckpointEvent) -> bool:
    """Whether somebody waits for an operation: it runs in the main thread, of the job's first process."""
    first = event.rank == 0 and all(os.environ.get(name, "0") == "0" for name in _RANKS)
    return first and event.operation in _VERBS and threading.current_thread() is threading.main_thread()


def _screen() -> _Screen | None:
    """Return what bars are drawn on; None where they would disturb or nobody looks."""
    if not _state.enabled or os.environ.get("DCP_PROGRESS", "").lower() in _OFF:
        return None
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if type(shell).__name__ == "ZMQInteractiveShell":
        return _Notebook()
    stream = sys.stderr
    if stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None
    return _Terminal()


def _title(event: CheckpointEvent) -> str:
    name = os.path.basename((event.checkpoint_id or "").rstrip("/"))
    name = "".join(letter if letter.isprintable() else "�" for letter in name)
    if len(name) > _NAME_LETTERS:
        name = f"{name[: _NAME_LETTERS - 1]}…"
    others = f" (rank 0 of {event.world_size})" if (event.world_size or 1) > 1 else ""
    return f"{_VERBS[event.operation]} {name}{others}"


def progress_columns(width: int) -> list[Any]:
    """Return the columns of a bar on a screen of that many columns."""
    from rich.filesize import pick_unit_and_suffix  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415 - only when a bar is shown
        BarColumn,
        DownloadColumn,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text  # noqa: PLC0415

    class RateColumn(ProgressColumn):
        """The rate in binary units, as the bytes beside it."""

        def render(self, task: Task) -> Text:
            speed = task.speed or 0.0
            unit, name = pick_unit_and_suffix(int(speed), ["B", "KiB", "MiB", "GiB", "TiB"], 1024)
            rate = "?" if task.speed is None else f"{speed / unit:.1f} {name}/s"
            return Text(rate, style="progress.data.speed")

    return [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=max(4, min(40, width - 80))),
        DownloadColumn(binary_units=True),
        RateColumn(),
        TimeRemainingColumn(elapsed_when_finished=False),
    ]

"""What commands print: tables and trees for people, JSON for programs, progress on long work.

Colours and bars appear on terminals only; bars go to stderr, so that output can be piped.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click

__all__ = ["age", "console", "count_bytes", "json_option", "print_json", "progress"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_WIDTH = 160

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def console() -> Any:
    """A rich console on stdout: as wide as the terminal, or wide enough for files and pipes."""
    from rich.console import Console  # noqa: PLC0415 - not needed for JSON

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_WIDTH)


def print_json(value: object) -> None:
    """One JSON document."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def count_bytes(count: int) -> str:
    """A size with three digits, e.g. `1.46 GiB`."""
    size, unit = float(count), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    if unit == 0:
        return f"{count} B"
    return f"{size:.{2 if size < 10 else 1 if size < 100 else 0}f} {_UNITS[unit]}"


def age(seconds: float) -> str:
    """How long ago, in the largest fitting unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


class Bar:
    """A progress bar of bytes, or nothing where none is shown.

    Args:
        update: Changes the bar's `total`, or moves it on by `advance`; None shows nothing.
    """

    def __init__(self, update: Callable[..., None] | None = None) -> None:
        self._update = update

    def __call__(self, count: int) -> None:
        """Advance the bar by so many bytes."""
        if self._update is not None:
            self._update(advance=count)

    def expect(self, total_bytes: int) -> None:
        """Set the bytes at which the bar is full."""
        if self._update is not None:
            self._update(total=total_bytes)


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Bar]:
    """A progress bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield Bar(partial(shown.update, shown.add_task(what, total=total_bytes)))

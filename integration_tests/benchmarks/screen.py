"""Shows how far a run is, and each table as soon as it is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from integration_tests.benchmarks import tables
from integration_tests.benchmarks.bars import Verdict
from integration_tests.benchmarks.results import RowResult
from integration_tests.benchmarks.runner import Say

__all__ = ["print_bars", "print_row", "progress"]


@contextmanager
def progress(console: Console, visits: int) -> Iterator[Say]:
    """A bar that a call moves on by one visit; lines where there is no terminal are left to the tables."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=visits)
        started = False

        def say(what: str) -> None:
            nonlocal started
            bar.update(task, description=escape(what), advance=int(started))
            started = True

        yield say
        bar.update(task, description="", advance=1)


def print_row(console: Console, row: RowResult) -> None:
    """One table per operation."""
    for kind in tables.KINDS:
        found = list(tables.lines(row, kind))
        if found:
            _print(console, f"{kind} — {tables.heading(row)}", tables.headings(kind), found)
    for name, entry in row.entries.items():
        if entry.failure is not None:
            console.print(f"{name} failed: {entry.failure}", style="red", markup=False)


def print_bars(console: Console, verdicts: Sequence[Verdict]) -> None:
    """The promises and what became of them."""
    _print(console, "What was promised", tables.BAR_HEADINGS, tables.bar_lines(verdicts))


def _print(console: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)

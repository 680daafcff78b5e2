"""Output of commands: lines, tables and trees for people, JSON for programs.

All output passes through this module, which escapes unprintable characters: names, paths, values and messages may come
from untrusted files. Colours appear on terminals only. Progress bars are in `dcp_inspect.visuals.progress_bar`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import click

from dcp_manifest import printable, printable_bytes

__all__ = [
    "Cell", "age", "confirm", "console", "count_bytes", "json_option", "print_json", "print_line", "print_lines",
    "print_table", "say",
]  # fmt: skip

count_bytes = printable_bytes
Cell = str | tuple[str, str]
"""A text, or a text and its style. A text is one line: a line break in it is escaped."""
_WIDTH = 160
# Longer tables are aligned without wrapping: laying out cells takes a minute for 200,000 rows.
_WRAPPED_ROWS = 1000
_LINES_AT_ONCE = 1000

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def console() -> Any:
    """Return a rich console on stdout: as wide as the terminal, or wide enough for files and pipes."""
    from rich.console import Console  # noqa: PLC0415 - not needed for JSON

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_WIDTH)


def say(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print a line without style; with `lines`, a text with intended line breaks."""
    click.echo(printable(text, keep="\n" if lines else ""), err=err)


def confirm(question: str) -> None:
    """Ask on stderr. Raises click.Abort if the answer is no."""
    click.confirm(printable(question), abort=True, err=True)


def print_line(*cells: Cell) -> None:
    """Print a line of styled parts."""
    print_lines([cells])


def print_lines(lines: Iterable[Sequence[Cell]]) -> None:
    """Print lines of styled parts; a terminal wraps long ones, files and pipes get whole lines."""
    out = console()
    rest = iter(lines)
    while some := [*islice(rest, _LINES_AT_ONCE)]:
        if out.is_terminal:
            out.print(_text(some))
        else:
            click.echo("\n".join("".join(printable(_parts(cell)[0]) for cell in cells) for cells in some))


def _parts(cell: Cell) -> tuple[str, str]:
    return (cell, "") if isinstance(cell, str) else cell


def _text(lines: Sequence[Sequence[Cell]]) -> Any:
    from rich.text import Text  # noqa: PLC0415

    whole = Text()
    for number, cells in enumerate(lines):
        whole.append("\n" if number else "")
        for cell in cells:
            text, style = _parts(cell)
            whole.append(printable(text), style or None)
    return whole


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, right: Sequence[str] = ()) -> None:
    """Print rows under headings; the columns named by `right` are aligned on the right."""
    table = [*rows]
    if len(table) > _WRAPPED_ROWS:
        print_lines(_aligned([[(name, "bold") for name in columns], *table], [name in right for name in columns]))
        return
    from rich.table import Table  # noqa: PLC0415

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        drawn.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for cells in table:
        drawn.add_row(*(_text([[cell]]) for cell in cells))
    console().print(drawn)


def _aligned(rows: Sequence[Sequence[Cell]], right: Sequence[bool]) -> Iterator[list[Cell]]:
    from rich.cells import cell_len  # noqa: PLC0415

    sizes = [[cell_len(printable(_parts(cell)[0])) for cell in row] for row in rows]
    widths = [max(column) for column in zip(*sizes, strict=True)]
    for row, taken in zip(rows, sizes, strict=True):
        line: list[Cell] = []
        for number, cell in enumerate(row):
            blanks = " " * (widths[number] - taken[number])
            line += [blanks, cell] if right[number] else [cell, blanks]
            line.append("  ")
        yield line


def print_json(value: object) -> None:
    """Print one JSON document, in ASCII; non-finite numbers become strings: `"NaN"`, `"Infinity"`, `"-Infinity"`."""
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=2, allow_nan=False)
    click.echo(text.replace("\x7f", "\\u007f"))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def age(seconds: float) -> str:
    """Format a time span in the largest fitting unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"

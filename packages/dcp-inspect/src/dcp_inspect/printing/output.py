"""Output of commands: lines for people, JSON for programs; tables are made by `table`.

All output passes through this module, which escapes unprintable characters: names, paths, values and messages may come
from untrusted files. Colours appear on terminals only. Progress bars are in `dcp_inspect.visuals.progress_bar`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import click

from dcp_inspect.printing.cells import Cell, cell_text
from dcp_inspect.printing.wrapping import wrapped
from dcp_manifest import printable, printable_bytes

__all__ = [
    "Cell", "age", "cell_text", "confirm", "console", "count_bytes", "json_option", "print_json", "print_line",
    "print_lines", "say", "styled",
]  # fmt: skip

count_bytes = printable_bytes
_LINES_AT_ONCE = 1000

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def console() -> Any:
    """Return a rich console on stdout. Its width matters on terminals only: files and pipes get whole lines."""
    from rich.console import Console  # noqa: PLC0415 - not needed for JSON

    return Console(highlight=False)


def say(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print a line without style; with `lines`, a text with intended line breaks.

    Terminals wrap long lines themselves: broken between words, an unquoted path with blanks could forge a line's start.
    """
    click.echo(printable(text, keep="\n" if lines else ""), err=err)


def confirm(question: str) -> None:
    """Ask on stderr. Raises click.Abort if the answer is no."""
    click.confirm(printable(question), abort=True, err=True)


def print_line(*cells: Cell) -> None:
    """Print a line of styled parts."""
    print_lines([cells])


def print_lines(lines: Iterable[Sequence[Cell]]) -> None:
    """Print lines of styled parts: on a narrow terminal broken between words, to files and pipes whole."""
    out = console()
    rest = iter(lines)
    while some := [*islice(rest, _LINES_AT_ONCE)]:
        if out.is_terminal:
            out.print(styled([line for cells in some for line in wrapped(cells, out.width)]), soft_wrap=True)
        else:
            click.echo("\n".join("".join(map(cell_text, cells)) for cells in some))


def styled(lines: Sequence[Sequence[Cell]]) -> Any:
    """Return lines of styled parts as rich's text."""
    from rich.text import Text  # noqa: PLC0415

    whole = Text()
    for number, cells in enumerate(lines):
        whole.append("\n" if number else "")
        for cell in cells:
            whole.append(cell_text(cell), None if isinstance(cell, str) else cell[1] or None)
    return whole


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

"""Output of commands, with unprintable characters escaped: names and values may come from untrusted files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import click

from dcp_base.escaping import printable, printable_bytes

count_bytes = printable_bytes
_LINES_AT_ONCE = 1000

Cell = str | tuple[str, str]
"""A text, or a text and its style; a line break is escaped."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def cell_text(cell: Cell) -> str:
    """Return the text of a cell as printed."""
    return printable(cell if isinstance(cell, str) else cell[0])


def console() -> Any:
    """Return a rich console on stdout; files and pipes get whole lines."""
    from rich.console import Console  # noqa: PLC0415 - not needed for JSON

    return Console(highlight=False)


def say(text: str, *, err: bool = False, lines: bool = False) -> None:
    """Print a line without style; with `lines`, keep the line breaks of the text.

    Lines are not wrapped here: an unquoted path with blanks, broken between words, could forge the start of a line.
    """
    click.echo(printable(text, keep="\n" if lines else ""), err=err)


def confirm(question: str) -> None:
    """Ask on stderr. Raises click.Abort if the answer is no."""
    click.confirm(printable(question), abort=True, err=True)


def print_line(*cells: Cell) -> None:
    """Print styled parts as a line."""
    print_lines([cells])


def print_lines(lines: Iterable[Sequence[Cell]]) -> None:
    """Print styled lines, wrapped on a narrow terminal only."""
    out = console()
    rest = iter(lines)
    while some := [*islice(rest, _LINES_AT_ONCE)]:
        if out.is_terminal:
            out.print(styled([line for cells in some for line in wrapped(cells, out.width)]), soft_wrap=True)
        else:
            click.echo("\n".join(["".join(map(cell_text, cells)) for cells in some]))


def styled(lines: Sequence[Sequence[Cell]]) -> Any:
    """Return styled lines as rich's text."""
    from rich.text import Text  # noqa: PLC0415

    whole = Text()
    for number, cells in enumerate(lines):
        whole.append("\n" if number else "")
        for cell in cells:
            whole.append(cell_text(cell), None if isinstance(cell, str) else cell[1] or None)
    return whole


def print_json(value: object, *, in_one_line: bool = False) -> None:
    """Print in ASCII, with `"NaN"`, `"Infinity"` and `"-Infinity"` as strings."""
    indent = None if in_one_line else 2
    try:
        text = json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=indent, allow_nan=False)
    click.echo(text.replace("\x7f", "\\u007f"))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def metrics_text(metrics: Mapping[str, float], *, before: str = "") -> str:
    """Format metrics on one line after `before`; empty without metrics."""
    return before + " ".join(f"{name}={value:.6g}" for name, value in metrics.items()) if metrics else ""


def age(seconds: float) -> str:
    """Format a time span in the largest fitting unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


_INDENT = "  "
_WORDS = re.compile(
    r"""\s*(?:
        [(\[{]*'[^']*'\S*                            # what is in quotes, and a comma after it
        | [(\[{]*`[^`]*`\S*                          # a command
        | \S+(?:\ ×\ \S+)+                          # a shape
        | [\d.,]+\ \S+                              # a number with its unit, or what it counts
        | \S+
    )|\s+""",
    re.VERBOSE,
)
_PLAIN_WORDS = re.compile(r"\s*\S+|\s+")
_GUIDES = re.compile(r"[│ ]*(?:├── |└── )?")


def wrapped(cells: Sequence[Cell], width: int) -> Iterator[list[Cell]]:
    """Break a line at `width` columns, but neither long words nor bold parts (names)."""
    from rich.cells import cell_len  # noqa: PLC0415 - not needed for files and pipes

    guides = _GUIDES.match(cell_text(cells[0]) if cells else "")
    before = ("" if guides is None else guides[0].replace("├── ", "│   ").replace("└── ", "    ")) + _INDENT
    line: list[Cell] = []
    taken = 0
    for text, style in _words(cells, width - cell_len(before)):
        size = cell_len(text)
        if line and taken + size > width and taken > cell_len(before) and text.strip():
            yield _without_blanks_at_the_end(line)
            line, text = [before], text.lstrip()
            taken, size = cell_len(before), cell_len(text)
        line.append((text, style) if style else text)
        taken += size
    yield line


def _without_blanks_at_the_end(line: list[Cell]) -> list[Cell]:
    while len(line) > 1 and not cell_text(line[-1]).strip():
        line = line[:-1]
    return line


def _words(cells: Sequence[Cell], room: int) -> Iterator[tuple[str, str]]:
    for number, cell in enumerate(cells):
        text, style = cell_text(cell), "" if isinstance(cell, str) else cell[1]
        if "bold" in style or (not number and _GUIDES.fullmatch(text)):
            yield text, style
        else:
            for found in _WORDS.findall(text):
                parts = [found] if len(found.strip()) <= room else _PLAIN_WORDS.findall(found)
                yield from ((part, style) for part in parts)

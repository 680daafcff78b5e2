"""Tables in aligned columns for terminals of any width, files and pipes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dcp_inspect.printing.output import Cell, cell_text, console, print_line, print_lines, styled

# Longer tables are aligned without wrapping: laying out cells takes a minute for 200,000 rows.
_WRAPPED_ROWS = 1000
# Columns are dropped to give a text column this width; below it, wrapping is not worthwhile.
_TEXT_WIDTH, _MIN_TEXT_WIDTH = 24, 12
_INDENT = 4


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    right: Sequence[str] = (),
    drop: Sequence[str] = (),
    wrap: Sequence[str] = (),
) -> None:
    """Print rows under headings, in aligned columns, without cutting a cell.

    Files and pipes get one line per row. On a narrow terminal, `drop` columns are left out in order, then `wrap`
    columns of text are wrapped, then each row takes two lines.
    """
    table: list[Sequence[Cell]] = [[(name, "bold") for name in columns], *rows]
    out = console()
    if not out.is_terminal or len(table) > _WRAPPED_ROWS:
        print_lines(_aligned(table, [name in right for name in columns]))
        return
    dropped = _dropped(columns, _widths(table), drop, wrap, out.width)
    shown, cells = _without(columns, table, dropped)
    needed = _total(_widths(cells))
    if needed <= out.width:
        print_lines(_aligned(cells, [name in right for name in shown]))
    elif _can_wrap(shown, cells, wrap, out.width):
        out.print(_wrapped(shown, cells[1:], right, wrap))
    else:
        below = out.width - _INDENT
        dropped = _dropped(columns[1:], _widths([row[1:] for row in table]), drop, (), below)
        shown, cells = _without(columns, table, dropped)
        print_lines(_stacked(cells, [name in right for name in shown[1:]]))
    if dropped:
        print_line((f"too narrow for: {', '.join(name for name in drop if name in dropped)}", "dim"))


def _without(
    columns: Sequence[str], table: Sequence[Sequence[Cell]], dropped: set[str]
) -> tuple[list[str], list[list[Cell]]]:
    kept = [number for number, name in enumerate(columns) if name not in dropped]
    return [columns[number] for number in kept], [[row[number] for number in kept] for row in table]


def _can_wrap(columns: Sequence[str], table: Sequence[Sequence[Cell]], wrap: Sequence[str], width: int) -> bool:
    texts = set(wrap) & set(columns)
    widths = dict(zip(columns, _widths(table), strict=True))
    room = width - _total([*widths.values()]) + sum(widths[name] for name in texts)
    return bool(texts) and room >= _MIN_TEXT_WIDTH * len(texts)


def _stacked(table: Sequence[Sequence[Cell]], right: Sequence[bool]) -> Iterator[list[Cell]]:
    rest = _aligned([row[1:] for row in table], right)
    for row, line in zip(table, rest, strict=True):
        yield [row[0]]
        yield [" " * _INDENT, *line]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _widths(table: Sequence[Sequence[Cell]]) -> list[int]:
    return [max(column) for column in zip(*_sizes(table), strict=True)]


def _sizes(table: Sequence[Sequence[Cell]]) -> list[list[int]]:
    from rich.cells import cell_len  # noqa: PLC0415

    return [[cell_len(cell_text(cell)) for cell in row] for row in table]


def _dropped(
    columns: Sequence[str], widths: Sequence[int], drop: Sequence[str], wrap: Sequence[str], width: int
) -> set[str]:
    least = {name: min(size, _TEXT_WIDTH) if name in wrap else size for name, size in zip(columns, widths, strict=True)}
    dropped: set[str] = set()
    for name in drop:
        if _total([size for each, size in least.items() if each not in dropped]) <= width:
            break
        dropped.add(name)
    return dropped


def _wrapped(columns: Sequence[str], rows: Sequence[Sequence[Cell]], right: Sequence[str], wrap: Sequence[str]) -> Any:
    from rich.table import Table  # noqa: PLC0415

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        justify = "right" if name in right else "left"
        drawn.add_column(name, justify=justify, no_wrap=name not in wrap, overflow="fold")  # type: ignore[arg-type]
    for cells in rows:
        drawn.add_row(*(styled([[cell]]) for cell in cells))
    return drawn


def _aligned(rows: Sequence[Sequence[Cell]], right: Sequence[bool]) -> Iterator[list[Cell]]:
    sizes = _sizes(rows)
    widths = [max(column) for column in zip(*sizes, strict=True)]
    for row, taken in zip(rows, sizes, strict=True):
        last = max((number for number, size in enumerate(taken) if size), default=-1)
        line: list[Cell] = []
        for number, cell in enumerate(row[: last + 1]):
            blanks = " " * (widths[number] - taken[number])
            line += [blanks, cell] if right[number] else [cell, "" if number == last else blanks]
            line.append("" if number == last else "  ")
        yield line

"""Tables on terminals of any width, and in pipes: names and units stay whole, and every cell can be found."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from dcp_inspect.printing import output, table

Shown = Callable[..., list[str]]
COLUMNS = ("checkpoint", "step", "size", "ranks", "values", "state")
PROBLEM = "__0_0.0123456789abcdef.distcp has 1,000,000 of 28,572,943 bytes"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Print a table on a terminal of some columns, or in a pipe for 0; returns the lines."""

    def shown(width: int, names: list[str], **options: Any) -> list[str]:
        screen = Console(file=io.StringIO(), force_terminal=bool(width), width=width or 20, color_system=None)
        with monkeypatch.context() as patch:
            for module in (output, table):
                patch.setattr(module, "console", lambda: screen)
            rows = [(name, str(step), "28.5 MiB", "8", "1203", "valid") for step, name in enumerate(names)]
            rows[-1] = (*rows[-1][:-1], PROBLEM)
            chosen = {"right": COLUMNS[1:-1], "drop": ("ranks", "values", "step"), "wrap": ("state",), **options}
            table.print_table(COLUMNS, rows, **chosen)
        written: str = screen.file.getvalue() + capsys.readouterr().out  # type: ignore[attr-defined]
        return [line.rstrip() for line in written.splitlines()]

    return shown


NAMES = ["runs/unknown/step-100", "runs/unknown/step-200", "x"]


@pytest.mark.parametrize("width", range(30, 170, 7))
@pytest.mark.parametrize("longest", [10, 40, 100])
def test_nothing_is_cut(shown: Shown, width: int, longest: int) -> None:
    names = [*NAMES, "y" * longest]
    lines = shown(width, names)
    for name in names[:-1]:
        (at,) = (number for number, line in enumerate(lines) if line.split("  ")[0] == name)
        assert "28.5 MiB" in lines[at] + (lines[at + 1] if at + 1 < len(lines) else "")
    text = "".join(line.strip() for line in lines)
    assert names[-1] in text.replace("\n", "")
    assert all(word in "".join(lines).replace(" ", "") for word in PROBLEM.split()) or width < 60
    if longest < width:
        # A single word may be wider than the terminal.
        assert all(len(line) <= width or len(line.split()) == 1 or "too narrow" in line for line in lines)


def test_columns_are_left_out_in_order(shown: Shown) -> None:
    heads = {width: shown(width, NAMES)[0].split() for width in (160, 80, 70, 55, 45)}
    assert heads == {
        160: [*COLUMNS],
        80: [*COLUMNS],
        70: ["checkpoint", "step", "size", "state"],
        55: ["checkpoint", "size", "state"],
        45: ["checkpoint", "size", "state"],
    }
    assert shown(70, NAMES)[-1] == "too narrow for: ranks, values"
    assert "too narrow" not in "".join(shown(160, NAMES))


@pytest.mark.parametrize("rows", [3, 1500])
def test_pipes_get_one_whole_line_a_row(shown: Shown, rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    names = [*(f"step-{number}" for number in range(rows)), "z" * 300]
    lines = shown(0, names)
    assert len(lines) == rows + 2
    assert lines[0].split() == [*COLUMNS]
    assert lines[-1] == "  ".join(["z" * 300, str(rows).rjust(4), "28.5 MiB", "    8", "  1203", PROBLEM])


def test_no_line_ends_with_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    table.print_table(("name", "n", "m"), [("long name", "1", ""), ("b", "", ""), ("", "", "")])
    assert capsys.readouterr().out == "name       n  m\nlong name  1\nb\n\n"

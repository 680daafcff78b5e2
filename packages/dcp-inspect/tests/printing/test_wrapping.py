"""Lines on narrow terminals: broken between words; names, quoted texts, shapes and sizes stay whole."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from dcp_inspect.printing.output import Cell, wrapped

Write = Callable[..., Path]
DataFile = Callable[[Path], Path]

LINES: list[list[Cell]] = [
    [("runs/a name with blanks/step-1", "bold"), ": 5 tensors, 2 objects, 2.97 KiB, 1 rank, written by dcp-core/0.1.0"],
    [("damaged", "red"), "  ", ("step-1", "bold"), ": 3 problems; 11 items, 71.0 KiB read"],
    ["  file '__0_0 1.distcp': the file ends at 50,000 of 72,715 bytes; 11 items are lost: 'käse brot', 'b' and more"],
    ["│   ├── ", ("model.layers.0.weight", "bold"), "  float8_e4m3fn  4096 × 11008  2 chunks  43.0 MiB"],
    ["    └── ", ("漢字.重み", "bold"), "  float32  128 × 3  1.50 KiB  of rank 3"],
    ["load an earlier checkpoint (`dcp ls 'a b'` shows them), or restore files from a copy"],
]
WHOLE = (
    "runs/a name with blanks/step-1", "5 tensors,", "2.97 KiB,", "1 rank,", "3 problems;", "71.0 KiB", "72,715 bytes;",
    "'__0_0 1.distcp':", "'käse brot',", "model.layers.0.weight", "4096 × 11008", "43.0 MiB", "漢字.重み", "128 × 3",
    "1.50 KiB", "(`dcp ls 'a b'`",
)  # fmt: skip


def text_of(line: list[Cell]) -> str:
    return "".join(cell if isinstance(cell, str) else cell[0] for cell in line)


def letters(text: str) -> str:
    return re.sub(r"[\s│├└─]", "", text)


@pytest.mark.parametrize("width", [*range(32, 130, 3)])
def test_nothing_is_broken_and_nothing_lost(width: int) -> None:
    for cells in LINES:
        lines = [text_of(line) for line in wrapped(cells, width)]
        assert all(cell_len(line) <= width for line in lines)
        assert letters("".join(lines)) == letters(text_of(cells))
        for whole in WHOLE:
            if whole in text_of(cells):
                assert any(whole in line for line in lines)


def test_lines_that_fit_stay_as_they_are() -> None:
    for cells in LINES:
        (line,) = wrapped(cells, 200)
        assert text_of(line) == text_of(cells)
    assert [text_of(line) for line in wrapped([], 50)] == [""]


def test_guides_of_a_tree_go_on() -> None:
    lines = [text_of(line) for line in wrapped(LINES[3], 40)]
    assert lines == [
        "│   ├── model.layers.0.weight",
        "│   │     float8_e4m3fn  4096 × 11008",
        "│   │     2 chunks  43.0 MiB",
    ]


def test_a_command_that_is_wider_than_the_terminal_is_broken_at_its_blanks() -> None:
    lines = [text_of(line) for line in wrapped([f"it holds: `dcp rm --force {'y' * 30}` removes it"], 40)]
    assert lines == ["it holds: `dcp rm --force", f"  {'y' * 30}`", "  removes it"]


def test_a_word_that_is_wider_than_the_terminal_has_a_line_of_its_own() -> None:
    name = "y" * 70
    lines = [text_of(line) for line in wrapped(["sound  ", (name, "bold"), ": 7 items"], 50)]
    assert lines == ["sound", f"  {name}", "  : 7 items"]


@pytest.mark.parametrize("columns", [50, 80])
def test_commands_on_a_terminal(tmp_path: Path, columns: int, write: Write, data_file: DataFile) -> None:
    name = "runs/a-long-name-of-an-experiment/step-000001"
    write(tmp_path / name)
    write(tmp_path / "cut")
    os.truncate(data_file(tmp_path / "cut"), 1000)
    for typed in (
        f"show {name}", f"verify {name}", "verify cut", "verify -r runs", "plan cut --world 2", "ls .",
    ):  # fmt: skip
        shown = on_terminal(tmp_path, columns, typed.split())
        words = [word for word in typed.split() if "/" in word]
        words += [data_file(tmp_path / "cut").name] * (typed == "verify cut")
        assert all(cell_len(line) <= columns for line in shown), shown
        assert all(any(word in line for line in shown) for word in words), shown


def on_terminal(folder: Path, columns: int, arguments: list[str]) -> list[str]:
    """What a command shows on a terminal of so many columns."""
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "1"}
    main, side = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "dcp_inspect", *arguments], stdout=side, stderr=side, env=environment, cwd=folder
    ):
        os.close(side)
        shown = b""
        while True:
            try:
                some = os.read(main, 65536)
            except OSError:  # the other end is closed
                break
            if not some:
                break
            shown += some
    os.close(main)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown.decode()).splitlines()

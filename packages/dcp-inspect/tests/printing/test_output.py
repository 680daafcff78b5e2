"""What is printed of very many, very long and very deep names, and of numbers that JSON has no form for."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator

import pytest

from dcp_inspect.printing import output, table
from dcp_inspect.printing.suggestions import near
from dcp_inspect.printing.tree import tree_lines


def shown(names: list[str], depth: int | None = None) -> list[str]:
    lines = tree_lines(((name, 1, "form") for name in names), depth)
    return ["".join(cell if isinstance(cell, str) else cell[0] for cell in line) for line in lines]


@pytest.fixture
def shallow() -> Iterator[None]:
    """A stack of few calls: what follows the parts of a name by recursion fails."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(250)
    yield
    sys.setrecursionlimit(before)


def test_names_of_3000_parts(shallow: None) -> None:
    long = ".".join(f"p{number}" for number in range(3000))
    assert shown([long]) == [f"{long}  form"]
    assert shown([long, "p0.x"])[1:] == [f"├── {long[3:]}  form", "└── x  form"]


def test_deep_levels(shallow: None) -> None:
    names = ["b." * depth + "t" for depth in range(1, 1500)]
    lines = shown(names)
    assert sum(line.endswith("  form") for line in lines) == len(names)
    assert lines[0] == "b  1499 values, 1.46 KiB"
    assert max(len(line) for line in lines) < 2 * 1500 + 200
    assert len(shown(names, depth=3)) == 1 + 2 + 2


def test_every_value_has_a_line() -> None:
    assert shown(["a.x", "a", "a.y", "b", "b.x"]) == [
        "a  2 values, 2 B", "├── x  form", "└── y  form", "a  form", "b  form", "b.x  form",
    ]  # fmt: skip
    assert shown([]) == []
    assert shown(["", ".", "..", "a..b"]) == ["  form", "  2 values, 2 B", "├──   form", "└── .  form", "a..b  form"]


def test_long_tables_are_aligned_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    table.print_table(("name", "n"), [(f"x\x1b{number}", str(number)) for number in range(20_000)], right=("n",))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "n"]
    assert lines[1].split() == ["x\\x1b0", "0"]
    assert len(lines) == 20_001
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "NaN"),
        ([[math.inf, -math.inf], {"x": (math.nan, 1.5)}], [["Infinity", "-Infinity"], {"x": ["NaN", 1.5]}]),
        ("\x7f\x1b\x9b\u2028\udc80ä", "\x7f\x1b\x9b\u2028\udc80ä"),
        ({"\x7f": "\x7f"}, {"\x7f": "\x7f"}),
    ],
)
def test_json(capsys: pytest.CaptureFixture[str], value: object, text: object) -> None:
    output.print_json(value)
    out = capsys.readouterr().out
    assert out.isascii()
    assert all(line.isprintable() for line in out.split("\n"))
    assert json.loads(out, parse_constant=pytest.fail) == text


def test_names_near_another() -> None:
    names = [f"layers.{number}.weight" for number in range(50_000)]
    assert near("layers.7.wieght", names)[0] == "layers.7.weight"
    assert near("x" * 100_000, names) == []
    assert near("a", ["b" * 100_000]) == []

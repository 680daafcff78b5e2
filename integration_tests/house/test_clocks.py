"""Times of several hosts are compared only where the page on the architecture says so, and why."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PAGE = ROOT / "docs/development/architecture.md"
# Times that another host may have written; a process's own are on the monotonic clock.
_TIMES = {
    "mtime",
    "st_mtime",
    "st_mtime_ns",
    "created_ns",
    "created_seconds",
    "modified_seconds",
    "started_ns",
    "created",
}
_CLOCKS = {"time", "time_ns"}
_ORDERING = {"sorted", "max", "min", "abs", "sort"}


def _is_time(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _TIMES
    called = node.func if isinstance(node, ast.Call) else None
    is_clock = isinstance(called, ast.Attribute) and called.attr in _CLOCKS
    return is_clock and isinstance(called.value, ast.Name) and called.value.id == "time"  # type: ignore[union-attr]


def _compares(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Sub)
    name = node.func if isinstance(node, ast.Call) else None
    return (isinstance(name, ast.Name) and name.id in _ORDERING) or (
        isinstance(name, ast.Attribute) and (name.attr in _ORDERING or name.attr == "keep")
    )


def comparisons(source: str) -> Iterator[str]:
    """Yield the names of functions that compare, subtract or order times."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            body = [node for statement in function.body for node in ast.walk(statement)]
            names = {"now"} if any(isinstance(node, ast.Call) and _is_time(node) for node in body) else set[str]()

            def is_time(node: ast.AST, names: set[str] = names) -> bool:
                return _is_time(node) or (isinstance(node, ast.Name) and node.id in names)

            if any(_compares(node) and any(map(is_time, ast.walk(node))) for node in body):
                yield function.name


def found() -> set[str]:
    sources = [path for path in ROOT.glob("packages/*/src/**/*.py") if "/testing/" not in str(path)]
    return {
        f"{path.relative_to(path.parents[len(path.parts) - path.parts.index('src') - 2])}: {name}"
        for path in sources
        for name in comparisons(path.read_text())
    }


def test_each_comparison_of_times_is_on_the_page() -> None:
    listed = re.findall(r"`(dcp_\w+/[\w/]+\.py: \w+)`", _PAGE.read_text())
    assert sorted(listed) == sorted(found())


def test_new_ones_are_noticed() -> None:
    for line in (
        "return time.time() - entry.mtime > 3600",
        "return one.created_ns > other.created_ns",
        "return sorted(records, key=lambda record: record.created_seconds)",
        "return max(entry.mtime for entry in entries)",
        "return policy.keep(records, time.time())",
    ):
        assert [*comparisons(f"def judge():\n    {line}")] == ["judge"], line
    for line in (
        "return time.monotonic() - begun > 3600",
        "return Event(time=time.time())",
        "return one.save_id == two",
    ):
        assert not [*comparisons(f"def judge():\n    {line}")], line

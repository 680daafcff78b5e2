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
_NUMBERS = {"max", "min", "abs", "float", "int", "round"}
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


def _times_of(body: list[ast.AST]) -> set[str]:
    """Return the names of variables that hold times, or their sums and differences."""
    names = {"now"} if any(isinstance(node, ast.Call) and _is_time(node) for node in body) else set[str]()
    assigned = [
        (target.id, node.value)
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    while more := {name for name, value in assigned if name not in names and _holds_time(value, names)}:
        names |= more
    return names


def _holds_time(node: ast.AST, names: set[str]) -> bool:
    if _is_time(node) or (isinstance(node, ast.Name) and node.id in names):
        return True
    if isinstance(node, ast.Call):
        inner = node.args if isinstance(node.func, ast.Name) and node.func.id in _NUMBERS else []
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.IfExp | ast.GeneratorExp | ast.ListComp):
        inner = [*ast.iter_child_nodes(node)]
    else:
        inner = []
    return any(_holds_time(each, names) for each in inner)


def comparisons(source: str) -> Iterator[str]:
    """Yield the names of functions that compare, subtract or order times."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            body = [node for statement in function.body for node in ast.walk(statement)]
            names = _times_of(body)

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
        "created = (one.created_ns or 0) / 1e9 or one.modified_seconds; return other < created",
        "age = float(entry.mtime); least = age; return sorted([least])",
        "if (written := max(each.mtime for each in entries)) < limit: return True",
    ):
        assert [*comparisons(f"def judge():\n    {line}")] == ["judge"], line
    for line in (
        "return time.monotonic() - begun > 3600",
        "return Event(time=time.time())",
        "return one.save_id == two",
        "event = Event(time=time.time()); return event.bytes > 0",
    ):
        assert not [*comparisons(f"def judge():\n    {line}")], line

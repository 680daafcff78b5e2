"""Rows of results as rows of text: what a table of one measurement says, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from integration_tests.benchmarks.bars import Verdict
from integration_tests.benchmarks.contenders import CONTENDERS, OURS
from integration_tests.benchmarks.figures import Spread, faster
from integration_tests.benchmarks.results import Entry, Results, RowResult

__all__ = [
    "BAR_HEADINGS",
    "KINDS",
    "STOCK",
    "SUMMARY_HEADINGS",
    "against_stock",
    "bar_lines",
    "failures",
    "heading",
    "headings",
    "lines",
    "number",
    "summary_lines",
    "variants",
]

KINDS = ("save", "load", "load, cold")
"""Tables of a row: variants of loading stand in one table."""

SUMMARY_HEADINGS = ("state", "where", "save", "load")
BAR_HEADINGS = ("target", "bar", "measured", "met")
STOCK = ("stock, 1 thread", "stock, 2 threads")
_TINY = 1e-4
_ALWAYS = {contender.name for contender in CONTENDERS if contender.fsync == "always"}
Line = Sequence[str]


def heading(row: RowResult) -> str:
    """What was measured, and where."""
    kind = "fsync" if row.fsync else "no fsync"
    scaled = "" if row.scale == 1 else f", scaled by {row.scale:g}"
    return f"{row.title}: {row.place}, {kind}{scaled}"


def headings(kind: str) -> Sequence[str]:
    """Of the table of one kind."""
    moved = {"save": "files ÷ state", "load": "read ÷ state", "load, cold": "from disk ÷ state"}[kind]
    return ("", "seconds (min–max)", "GB/s", "ours ÷ this (min–max)", "peak, MiB", moved)


def variants(entry: Entry, kind: str) -> Iterator[tuple[str, str]]:
    """What one contender did of a kind: the variant's name, and the operation."""
    for operation in entry.operations:
        action, *rest = operation.split(", ")
        cold = "cold" in rest
        if action + (", cold" if cold else "") == kind:
            yield ", ".join(word for word in rest if word != "cold"), operation


def lines(row: RowResult, kind: str) -> Iterator[Line]:
    """One line per contender and variant that did, or failed to do, an operation."""
    for name, entry in row.entries.items():
        shown = f"{name} (flushes always)" if kind == "save" and not row.fsync and name in _ALWAYS else name
        for variant, operation in variants(entry, kind):
            label = f"{shown}, {variant}" if variant else shown
            seconds = entry.spread(operation)
            if seconds is not None:
                yield (label, *_figures(row, name, kind, operation, seconds))
        if entry.failure is not None and kind != "load, cold":
            yield (name, "failed", "", "", "", "")


def _figures(row: RowResult, name: str, kind: str, operation: str, seconds: Spread) -> Line:
    entry = row.entries[name]
    ratio = row.ratio(kind, OURS, name, operation) if (name, operation) != (OURS, kind) else None
    peak = entry.spread(operation, "peak_bytes")
    read = entry.spread(operation, "read_bytes" if kind == "load, cold" else "rchar")
    moved = entry.sizes["bytes"] if kind == "save" else read.median if read is not None else 0
    speed = row.bytes / seconds.median / 1e9
    return (
        with_ends(seconds),
        f"{speed:.2f}" if speed >= 0.01 else "",
        with_ends(ratio) if ratio else "",
        f"{peak.median / 2**20:.0f}" if peak else "",
        f"{moved / row.bytes:.2f}",
    )


def against_stock(row: RowResult, operation: str) -> float | None:
    """Our seconds ÷ those of the best setting of stock, in the median; None without a figure of stock."""
    ratios = [row.ratio(operation, OURS, name) for name in STOCK]
    return max((ratio.median for ratio in ratios if ratio is not None), default=None)


def summary_lines(results: Results) -> Iterator[Line]:
    """One line per row that stock took part in."""
    for row in results.rows:
        found = [against_stock(row, operation) for operation in ("save", "load")]
        if None not in found:
            where = f"{row.place}, {'fsync' if row.fsync else 'no fsync'}"
            yield row.title, where, *(faster(ratio) for ratio in found if ratio is not None)


def bar_lines(verdicts: Sequence[Verdict]) -> Iterator[Line]:
    """One line per bar."""
    for verdict in verdicts:
        unit = f" {verdict.bar.unit}" if verdict.bar.unit else ""
        measured = "not measured" if verdict.found is None else f"{number(verdict.found)}{unit}"
        met = {None: "–", True: "yes", False: "**no**"}[verdict.met]
        yield verdict.bar.title, f"≤ {verdict.bar.most:g}{unit}", measured, met


def failures(results: Results) -> Iterator[Line]:
    """Who failed where, and the last thing it said."""
    for row in results.rows:
        for name, entry in row.entries.items():
            if entry.failure is not None:
                yield heading(row), name, entry.failure.strip().splitlines()[-1]


def number(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}" if value >= _TINY else "0"


def with_ends(found: Spread) -> str:
    """Median, and the ends of the spread."""
    return f"{number(found.median)} ({number(found.low)}–{number(found.high)})"

"""What this library promises about its speed and thrift: each promise, computed from results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from integration_tests.benchmarks.contenders import FLOOR, OURS
from integration_tests.benchmarks.results import Results, RowResult

__all__ = ["BARS", "Bar", "Verdict", "judge"]

RAW, ALONE = "ours, raw layout", "ours, raw, interop=False"
STOCK = ("stock, 1 thread", "stock, 2 threads")
MIB = 1 << 20
# 64 MiB, and the default of `max_inflight_bytes`.
BUDGET_MIB = 64 + 64
Measure = Callable[[Results], float | None]


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and the most that it may be."""

    title: str
    most: float
    measure: Measure
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar and what was found; None where the results lack what it needs."""

    bar: Bar
    found: float | None

    @property
    def met(self) -> bool | None:
        """Whether the bar was reached."""
        return None if self.found is None else self.found <= self.bar.most


def judge(results: Results) -> list[Verdict]:
    """Every bar, with what these results say."""
    return [Verdict(bar, bar.measure(results)) for bar in BARS]


def _best(row: RowResult, operation: str, names: Sequence[str]) -> str | None:
    """Of several settings the one with the least median."""
    medians = {name: row.entries[name].spread(operation) for name in names if name in row.entries}
    known = {name: found.median for name, found in medians.items() if found is not None}
    return min(known, key=known.__getitem__) if known else None


def _ratio(case: str, place: str, operation: str, rivals: Sequence[str], *, fsync: bool) -> Measure:
    def measure(results: Results) -> float | None:
        row = results.row(case, place, fsync=fsync)
        rival = _best(row, operation, rivals) if row is not None else None
        found = row.ratio(operation, OURS, rival) if row is not None and rival is not None else None
        return found.median if found is not None else None

    return measure


def _read_ratio(case: str, operation: str) -> Measure:
    """Bytes read ÷ bytes that the ranks hold, the worse of the two layouts."""

    def measure(results: Results) -> float | None:
        found = [
            read.median / row.bytes
            for row in results.rows
            if row.case == case
            for name in (OURS, RAW)
            if name in row.entries and (read := row.entries[name].spread(operation, "rchar")) is not None
        ]
        return max(found, default=None)

    return measure


def _bytes_per_tensor(contender: str, part: str) -> Measure:
    def measure(results: Results) -> float | None:
        row = results.row("scalars", "disk", fsync=True)
        sizes = row.entries[contender].sizes if row is not None and contender in row.entries else {}
        if row is None or not sizes:
            return None
        parts = {"data": sizes["bytes"] - sizes["index_bytes"], "index": sizes["index_bytes"], "all": sizes["bytes"]}
        return parts[part] / row.tensors

    return measure


def _peak(results: Results) -> float | None:
    """The largest peak of all our saves and loads by several ranks, MiB."""
    peaks = [
        cost["peak_bytes"] / MIB
        for row in results.rows
        if row.case in ("4gib", "4gib-reshard", "rows", "columns")
        for name in (OURS, RAW)
        if name in row.entries
        for costs in row.entries[name].operations.values()
        for cost in costs
    ]
    return max(peaks, default=None)


BARS = (
    Bar(
        "save 1 GiB, disk, fsync, 1 rank ÷ raw write and fsync",
        1.10,
        _ratio("gib", "disk", "save", [FLOOR], fsync=True),
    ),
    Bar("the same ÷ best stock setting", 0.67, _ratio("gib", "disk", "save", STOCK, fsync=True)),
    Bar(
        "save 1 GiB, tmpfs, no fsync ÷ `safetensors.torch.save_file`",
        1.0,
        _ratio("gib", "tmpfs", "save", ["safetensors"], fsync=False),
    ),
    Bar(
        "load 1 GiB warm (disk), in place, verified ÷ raw `preadv`",
        1.35,
        _ratio("gib", "disk", "load", [FLOOR], fsync=True),
    ),
    Bar("the same on tmpfs", 1.35, _ratio("gib", "tmpfs", "load", [FLOOR], fsync=False)),
    Bar("load 1 GiB warm (disk) ÷ stock", 0.45, _ratio("gib", "disk", "load", STOCK, fsync=True)),
    Bar("the same on tmpfs", 0.45, _ratio("gib", "tmpfs", "load", STOCK, fsync=False)),
    Bar("20,000 scalars, save ÷ best stock setting", 0.05, _ratio("scalars", "disk", "save", STOCK, fsync=True)),
    Bar("20,000 scalars, load ÷ stock", 0.05, _ratio("scalars", "disk", "load", STOCK, fsync=True)),
    Bar("20,000 scalars, data per tensor, readable by stock", 600, _bytes_per_tensor(OURS, "data"), "B"),
    Bar("20,000 scalars, `.metadata` per tensor, readable by stock", 280, _bytes_per_tensor(OURS, "index"), "B"),
    Bar(
        "20,000 scalars, data and `.metadata` per tensor, raw, interop=False", 100, _bytes_per_tensor(ALONE, "all"), "B"
    ),
    Bar("bytes read ÷ needed, rows (16 MiB in one piece), verified", 1.1, _read_ratio("rows", "load")),
    Bar("bytes read ÷ needed, columns (2 KiB of 8), verified", 4.05, _read_ratio("columns", "load")),
    Bar("bytes read ÷ needed, columns, unverified", 1.6, _read_ratio("columns", "load, unverified")),
    Bar(
        "largest peak of a rank above its tensors: 1 and 4 GiB, resharded or not, both layouts",
        BUDGET_MIB,
        _peak,
        "MiB",
    ),
)

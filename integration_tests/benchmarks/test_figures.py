"""The arithmetic of the tables, and what becomes of it in bars and on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.benchmarks import report, tables
from integration_tests.benchmarks.bars import judge
from integration_tests.benchmarks.figures import Spread, paired, spread
from integration_tests.benchmarks.results import Entry, Results, RowResult

MIB = 1 << 20


def costs(*seconds: float, **figures: float) -> list[dict[str, float]]:
    zeros = dict.fromkeys(("peak_bytes", "rchar", "wchar", "read_bytes", "write_bytes"), 0.0)
    return [{**zeros, **figures, "seconds": each} for each in seconds]


def row(case: str, place: str, *, fsync: bool, entries: dict[str, Entry]) -> RowResult:
    return RowResult(case, f"title of {case}", place, fsync, 1.0, 3, 100, 1000, "2020-01-01", entries=entries)


def found(results: Results) -> dict[str, float | None]:
    return {verdict.bar.title: verdict.found for verdict in judge(results)}


def test_spread_is_median_and_ends() -> None:
    assert spread([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0, 3)
    assert spread([]) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "median"),
    [([1, 2, 30], [2, 4, 10], 0.5), ([1, 2, 30], [2, 4], 0.5), ([1, 2], [0, 4], 0.5), ([1], [], None)],
    ids=["median of ratios", "failed later", "too short to time", "never ran"],
)
def test_ratios_are_paired_within_a_round(ours: list[float], theirs: list[float], median: float | None) -> None:
    ratio = paired(ours, theirs)
    assert (ratio.median if ratio is not None else None) == median


def test_bar_takes_the_best_setting_of_a_rival() -> None:
    entries = {
        "ours": Entry({"save": costs(1, 1, 1)}),
        "stock, 1 thread": Entry({"save": costs(4, 4, 4)}),
        "stock, 2 threads": Entry({"save": costs(2, 2, 2)}),
    }
    bars = found(Results(rows=[row("gib", "disk", fsync=True, entries=entries)]))
    assert bars["the same ÷ best stock setting"] == 0.5
    assert bars["save 1 GiB, disk, fsync, 1 rank ÷ raw write and fsync"] is None, "the floor was not measured"


def test_bars_of_bytes_and_memory_take_the_worse_layout() -> None:
    rows = [
        row("rows", "disk", fsync=False, entries={
            "ours": Entry({"load": costs(1, rchar=1000)}), "ours, raw layout": Entry({"load": costs(1, rchar=1500)})
        }),
        row("4gib", "disk", fsync=True, entries={
            "ours": Entry({"save": costs(1, 1, peak_bytes=2 * MIB), "load": costs(1, peak_bytes=9 * MIB)}),
            "stock, 1 thread": Entry({"save": costs(1, peak_bytes=999 * MIB)}),
        }),
        row("scalars", "disk", fsync=True, entries={"ours": Entry({}, {"files": 3, "bytes": 900, "index_bytes": 200})}),
    ]  # fmt: skip
    bars = found(Results(rows=rows))
    assert bars["bytes read ÷ needed, rows (16 MiB in one piece), verified"] == 1.5
    assert bars["largest peak of a rank above its tensors: 1 and 4 GiB, resharded or not, both layouts"] == 9
    assert bars["20,000 scalars, data per tensor, readable by stock"] == 7


def test_tables_pair_variants_of_loading_with_our_own_load() -> None:
    entries = {
        "ours": Entry({"load": costs(2), "load, unverified": costs(1), "load, cold": costs(4)}),
        "raw floor": Entry({"load": costs(1), "load, cold": costs(1)}),
        "other": Entry(failure="Traceback\nOSError: full"),
    }
    single = row("gib", "disk", fsync=True, entries=entries)
    assert [(line[0], line[3].split(" ")[0]) for line in tables.lines(single, "load")] == [
        ("ours", ""), ("ours, unverified", "2.00"), ("raw floor", "2.00"), ("other", ""),
    ]  # fmt: skip
    assert [(line[0], line[3].split(" ")[0]) for line in tables.lines(single, "load, cold")] == [
        ("ours", ""), ("raw floor", "4.00"),
    ]  # fmt: skip


def test_page_tells_of_failures_and_missed_bars_and_keeps_what_was_written_by_hand(tmp_path: Path) -> None:
    entries = {
        "ours": Entry({"save": costs(3, 3)}, {"files": 1, "bytes": 1000, "index_bytes": 0}),
        "raw floor": Entry({"save": costs(1, 1)}, {"files": 1, "bytes": 1000, "index_bytes": 0}),
        "Orbax": Entry(failure="Traceback\nOSError: full"),
    }
    results = Results({"memory": "1 GiB"}, {"ours": "1.0"}, [row("gib", "disk", fsync=True, entries=entries)])
    file, made = tmp_path / "results.json", tmp_path / "benchmarks.md"
    results.write(file)
    assert Results.read(file) == results
    assert report.main([str(file), "--page", str(made)]) == 0
    made.write_text(made.read_text().replace(report.BEGIN, f"{report.BEGIN}\nwhat we tried"))
    assert report.main([str(file), "--page", str(made)]) == 0
    text = made.read_text()
    assert "| save 1 GiB, disk, fsync, 1 rank ÷ raw write and fsync | ≤ 1.1 | 3.00 | **no** |" in text
    assert "| title of gib: disk, fsync | Orbax | OSError: full |" in text
    assert "what we tried" in text
    assert (tmp_path / "images" / "benchmark-gib.svg").exists()


def test_page_of_the_docs_prints_its_results() -> None:
    results = Results.read(report.PAGE.with_suffix(".json"))
    images = {row.case: f"images/benchmark-{row.case}.svg" for row in results.rows}
    assert report.page(results, report.notes_by_hand(report.PAGE), images) == report.PAGE.read_text()

"""The benchmark of exports measures real ranks, and says what it measured."""

from __future__ import annotations

import sys

import pytest

from integration_tests.benchmarks import export


def _rounds(*seconds: float, written: int, read: int) -> list[dict[str, float]]:
    return [{"seconds": one, "peak_bytes": 5 << 20, "written": written, "read": read} for one in seconds]


def test_the_table_has_medians_and_paired_ratios() -> None:
    figures = {
        "checkpoint": _rounds(1.0, 2.0, 4.0, written=100, read=0),
        "export": _rounds(2.0, 1.0, 3.0, written=101, read=0),
        "stock": _rounds(9.0, written=200, read=100),
    }
    *_, row = export.tables({(1, 4): figures}, 100)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        *("columns", "4", "2.00", "2.00", "0.75 (0.50 to 2.00)", "9.00", "1.01", "0.00", "2.00, 1.00", "5"),
    ]


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    arguments = ["--ranks", "2", "--mib", "64", "--rounds", "1", "--stock-rounds", "1", "--place", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["export", *arguments])
    assert export.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["rows", "columns"]
    assert {tuple(cell.strip() for cell in line.split("|")[7:9]) for line in lines[2:]} == {("1.00", "0.00")}
    assert not [*tmp_path.iterdir()]

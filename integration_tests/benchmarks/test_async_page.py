"""What becomes of the asynchronous benchmark's figures on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration_tests.benchmarks.async_page import BEGIN, END, bars, write_page


def figures() -> dict[str, Any]:
    ours = {"lost": 0.2, "lost of the window": 0.1, "worst": 0.06, "worst without": 0.01, "blocked": 0.1, "save": 3.0}
    stock = {"lost": 2.0, "lost of the window": 1.0, "worst": 0.5, "worst without": 0.01, "blocked": 0.4, "save": 2.0}
    alone = {"returned": 0.2, "returned of memcpy": 1.2, "save": 1.0, "first save": 3.0, "message bytes": 166}
    return {
        "described": {"rounds": 5, "tensors": 4000, "mib": 512, "machine": {"processor": "some, 2 cores"}},
        "beside training": {"window": 2.0, "ours process": ours, "stock process": stock},
        "until it returns": {
            "ours process": {**alone, "first save, warm": 1.1},
            "stock process": {**alone, "first save": 4.0},
        },
        "many saves": {"ours process": {"resident MiB": 1.0, "shared MiB": 0.0, "descriptors": 0.0}},
        "few descriptors": {"ours process": "saved", "stock process": "OSError: Too many open files"},
    }


def test_bars_are_ratios_of_one_run() -> None:
    found = {name: (value, value is not None and value <= most) for name, value, most in bars(figures())}
    assert found["lost training time ÷ stock's (process)"] == (0.1, True)
    assert found["worst step above the median, ms"] == (60.0, False)
    assert found["duration of a save while training runs ÷ stock's (process)"] == (1.5, False)
    assert found["first save ÷ stock's first"] == (0.75, True)
    assert found["first save after `warm_up` ÷ a later one"] == (1.1, True)


def test_what_was_not_measured_is_said() -> None:
    told = figures()
    del told["beside training"]["stock process"], told["many saves"]["ours process"]
    found = {name: value for name, value, _ in bars(told)}
    assert found["lost training time ÷ stock's (process)"] is None
    assert found["the same, descriptors"] is None


def test_tables_go_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    write_page(page, figures())
    text = page.read_text()
    assert text.startswith("before\n\n" + BEGIN)
    assert text.endswith(END + "\n\nafter\n")
    assert "old" not in text
    assert "| worst step above the median, ms | 60 | 50 | missed |" in text
    assert "| stock process | OSError: Too many open files |" in text
    write_page(page, figures())
    assert page.read_text() == text


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="marks"):
        write_page(page, figures())

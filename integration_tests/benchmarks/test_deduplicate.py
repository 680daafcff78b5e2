"""The benchmark of saves with links measures what it says, and makes a table."""

from __future__ import annotations

from pathlib import Path

from integration_tests.benchmarks import deduplicate


def test_the_benchmark_of_links(tmp_path: Path) -> None:
    figures = deduplicate.measure(tmp_path, 40 << 20, 160, 1)
    shares = {name: row["share"] for name, row in figures["rows"].items()}
    for name in ("plain save", "deduplicate: first save", "deduplicate: all changed"):
        assert 0.99 < shares[name] < 1.05
    for name in ("deduplicate: second save", "deduplicate: third save"):
        assert 0.04 < shares[name] < 0.07
    assert shares["plain save, then `cp -al`"] == 0
    page = tmp_path / "page.md"
    page.write_text("<!-- figures: python -m integration_tests.benchmarks.deduplicate -->\n<!-- end of figures -->\n")
    deduplicate.write_page(page, figures)
    assert "| deduplicate: second save | 0.0" in page.read_text()
